"""The notebook workbench: the only bridge between engine events and widgets.

from strata_lab.workbench import Workbench
Workbench("smollm2-135m")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata_lab.workbench.session import Workbench

__all__ = ["Workbench"]


def __getattr__(name: str) -> Any:
    """Load the workbench, and with it the notebook packages, on first use."""
    if name != "Workbench":
        raise AttributeError(f"strata_lab.workbench has no {name!r}; it has Workbench")
    from strata_lab.workbench.session import Workbench

    return Workbench
