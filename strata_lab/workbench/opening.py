"""Opening and folding panels of details, and what the engine counts only while a panel is open.

It is the part of `Workbench` that the row of buttons talks to.
"""

from __future__ import annotations

from collections.abc import Iterable

from strata_lab.workbench.changes import SettingChanges


class OpensDetails(SettingChanges):
    """Opens and folds panels."""

    def open(self, *names: str) -> None:
        """Open panels of details: "causes", "blocks", "hardware", ... (`wb.panels.details.all`).

        Raises:
            ValueError: there is none of that name.
        """
        self._set_open(names, True)

    def fold(self, *names: str) -> None:
        """Close panels of details; all without a name. A closed one gets no data and costs nothing."""
        self._set_open(names or self.panels.details.open_names, False)

    def _open_asked(self, name: str, is_open: bool) -> None:
        if name in self.panels.details.all:
            self._set_open([name], is_open)

    def _set_open(self, names: Iterable[str], is_open: bool) -> None:
        for name in names:
            self.panels.details.set_open(name, is_open)
        self._queue(self._settings, self._watch_experts)

    def _watch_experts(self) -> None:
        """Let the engine count its experts while somebody looks, and only then."""
        engine = self._engine
        if engine is None or not engine.model_config.num_experts:
            return
        try:
            engine.watch_experts(self.panels.details.is_open(self.panels.experts.name))
        except Exception as error:  # shown in the panel: there is no one to raise it to
            self.panels.experts.say(f"The experts cannot be counted: {error}")
