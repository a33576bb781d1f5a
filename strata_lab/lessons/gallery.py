"""Every notebook, executed and as a page: `python -m strata_lab.lessons.gallery artifacts/gallery`.

A page needs nothing from the network: plotly is one file beside it, the theme follows the reader's system. Widgets need
a kernel, so a page says where one would be. Pages are made from what the cells really gave.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = REPOSITORY / "notebooks"
# What makes a notebook short; one that declares a parameter of this name gets this value.
QUICK = {"seconds": 1.0, "close_at_end": True}
PLOTLY, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"
SCRIPT = "plotly.min.js"
TOLD = "told"  # tag of a cell whose source is folded away: it says in words what was measured
_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}
_NO_WIDGET = "<p><em>A widget stands here while a kernel runs: open the notebook to use it.</em></p>"
_OUTSIDE = re.compile(r"<script[^>]*\bsrc=\"https?://[^>]*></script>|<link[^>]*\bhref=\"https?://[^>]*>")
_MERMAID = re.compile(r"<script type=\"module\">(?:(?!</script>).)*mermaid.*?</script>", re.S)  # would be fetched
_INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>strata_lab notebooks</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }}
li {{ margin: .6rem 0 }} small {{ display: block; opacity: .8 }}</style></head>
<body><h1>strata_lab notebooks</h1><ol start="0" style="list-style: none; padding: 0">
{items}
</ol></body></html>
"""


class NotebookFailed(RuntimeError):
    """A cell raised; the message is papermill's report."""


@dataclass(frozen=True)
class Executed:
    """A notebook that ran.

    Attributes:
        path: the executed copy.
        title: its first heading.
        duration_s: papermill's, kernel start included.
    """

    path: Path
    title: str
    duration_s: float


def parameters(notebook: Any) -> set[str]:
    """Names that the cell tagged `parameters` assigns."""
    sources = [c.source for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    lines = [line for source in sources for line in source.splitlines() if "=" in line]
    return {line.split("=")[0].split(":")[0].strip() for line in lines}


def execute(path: Path, folder: Path, values: Mapping[str, Any] = QUICK, timeout_s: float = 400.0) -> Executed:
    """Run a notebook with papermill in a process of its own; the copy goes to `folder`.

    Args:
        path: the notebook.
        folder: is made where it does not exist.
        values: for those parameters that the notebook declares.
        timeout_s: for all of it.

    Raises:
        NotebookFailed: a cell raised.
    """
    import nbformat

    folder.mkdir(parents=True, exist_ok=True)
    done = folder / path.name
    declared = parameters(nbformat.read(path, as_version=4))
    chosen = [part for name, value in values.items() if name in declared for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", str(path), str(done), "--cwd", str(path.parent), "--no-progress-bar"]
    result = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=timeout_s)
    if result.returncode:
        raise NotebookFailed(result.stderr[-4000:])
    notebook = nbformat.read(done, as_version=4)
    return Executed(done, title_of(notebook), notebook.metadata.papermill.duration)


def title_of(notebook: Any) -> str:
    """The first heading."""
    found = re.search(r"^# (.+)$", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"), re.M)
    return found.group(1) if found else "untitled"


def _chart(data: Mapping[str, Any], name: str) -> str:
    """A plotly output as HTML that draws itself; `</` cannot end the script early."""
    parts = [json.dumps(part).replace("</", "<\\/") for part in (data.get("data", []), data.get("layout", {}), _CONFIG)]
    style = f"height:{data.get('layout', {}).get('height', 400)}px"
    return f'<div id="{name}" style="{style}"></div><script>Plotly.newPlot("{name}", {", ".join(parts)})</script>'


def drawable(notebook: Any) -> Any:
    """The same notebook with charts that draw themselves and a note in the place of widgets; changed in place."""
    notebook.metadata.pop("widgets", None)
    for i, cell in enumerate(notebook.cells):
        for k, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            if PLOTLY in data:
                output["data"] = {"text/html": _chart(data[PLOTLY], f"chart-{i}-{k}")}
            elif WIDGET in data:
                output["data"] = {"text/html": _NO_WIDGET}
    return notebook


def page(executed: Path) -> Path:
    """Write the HTML page of an executed notebook beside it; asks nothing of the network."""
    import nbformat
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import TagRemovePreprocessor

    exporter = HTMLExporter(template_name="lab", theme="light", mathjax_url="", require_js_url="")
    exporter.register_preprocessor(TagRemovePreprocessor(remove_input_tags={TOLD}, enabled=True), enabled=True)
    text, _ = exporter.from_notebook_node(drawable(nbformat.read(executed, as_version=4)))
    text = _MERMAID.sub("", _OUTSIDE.sub("", text))
    head = f'<style>@media (prefers-color-scheme: dark) {{{_dark_theme()}}}</style><script src="{SCRIPT}"></script>'
    text = text.replace("</head>", f'<meta name="color-scheme" content="light dark">{head}</head>', 1)
    target = executed.with_suffix(".html")
    target.write_text(text, encoding="utf-8")
    return target


def _dark_theme() -> str:
    """nbconvert's own dark theme: the variables that all of its page's colours come from."""
    from jupyter_core.paths import jupyter_path

    for folder in jupyter_path("nbconvert", "templates", "lab", "static"):
        path = Path(folder) / "theme-dark.css"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError("theme-dark.css of nbconvert's lab template is missing; install nbconvert 7 or newer")


def index(done: Sequence[Executed], folder: Path) -> Path:
    """Write `index.html` and the one script that all pages share."""
    from plotly.offline import get_plotlyjs

    (folder / SCRIPT).write_text(get_plotlyjs(), encoding="utf-8")
    rows = [
        f'<li><a href="{one.path.stem}.html">{html.escape(one.title)}</a><small>ran in {one.duration_s:.0f} s · '
        f'<a href="{one.path.name}">executed notebook</a></small></li>'
        for one in done
    ]
    target = folder / "index.html"
    target.write_text(_INDEX.format(items="\n".join(rows)), encoding="utf-8")
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m strata_lab.lessons.gallery", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="notebooks whose names begin so, for example 03")
    parser.add_argument("--seconds", type=float, default=QUICK["seconds"], help="how long a measurement may take")
    given = parser.parse_args(arguments)
    done = []
    for path in sorted(NOTEBOOKS.glob(f"{given.only or ''}*.ipynb")):
        executed = execute(path, given.folder, {**QUICK, "seconds": given.seconds})
        page(executed.path)
        done.append(executed)
        sys.stdout.write(f"{executed.duration_s:6.1f} s  {path.name}\n")
    if not done:
        sys.stderr.write(f"--only {given.only}: no notebook in {NOTEBOOKS} begins so; try --only 01\n")
        return 1
    sys.stdout.write(f"{index(done, given.folder)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
