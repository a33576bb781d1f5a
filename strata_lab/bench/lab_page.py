"""A real JupyterLab in a real browser: for the browser test, screenshots, and what the page costs.

Everything is local: its own configuration folders, a random free port, no news, no update check.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "strata"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
START_S = 60

# Runs code in the notebook's kernel and returns what it printed.
_ASK = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code, store_history: false });
  let out = "";
  future.onIOPub = (message) => {
    if (message.header.msg_type === "stream") out += message.content.text;
    if (message.header.msg_type === "error") out += "ERROR " + message.content.evalue;
  };
  await future.done;
  return out;
}"""
_IDLE = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
# True when every cell ran, the error's text when one failed, false while they run.
_ALL_RAN = """() => {
  const error = document.querySelector(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']");
  if (error) return error.textContent;
  const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map((e) => e.textContent);
  return prompts.length > 0 && prompts.every((text) => /\\[\\d+\\]/.test(text));
}"""


def why_no_browser() -> str:
    """What is missing for a browser test; empty when nothing is."""
    if browser_path() is None:
        return f"no browser: none of {', '.join(BROWSERS)} is installed"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed; pip install playwright (no browser download is needed)"
    return ""


def browser_path() -> str | None:
    """The first browser found."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """A JupyterLab server on `folder`; yields its address."""
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        lab_settings(Path(scratch))
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.token={TOKEN}",
            f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.extension_manager=readonly",
        ]  # fmt: skip
        with served(command, scratch, f"http://127.0.0.1:{port}/api/status?token={TOKEN}"):
            yield f"http://127.0.0.1:{port}"


def lab_settings(scratch: Path) -> None:
    """Settings under which no question covers the page."""
    settings = scratch / "config" / "labconfig"
    settings.mkdir(parents=True)
    news = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (settings / "page_config.json").write_text(json.dumps(news))


def write_notebook(path: Path, cells: list[str]) -> None:
    """A notebook of these code cells."""
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(notebook, path)


Server = subprocess.Popen[bytes]


@contextlib.contextmanager
def served(
    command: list[str], scratch: str, address: str, end: Callable[[Server], None] = Server.terminate
) -> Iterator[None]:
    """A server of notebooks with settings of its own, under `scratch`, from when it answers at `address`.

    Args:
        command: what starts it, in a session of its own.
        scratch: an empty folder.
        address: answers as soon as it is ready.
        end: how to stop it.
    """
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": f"{scratch}/config",
        "JUPYTER_DATA_DIR": f"{scratch}/data",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "widgets")]),  # also where nothing is installed
    }
    with open(Path(scratch) / "log", "w") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_for(address, server, Path(scratch) / "log")
        yield
    finally:
        end(server)
        server.wait(20)


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    # The address is of a server that was started here, which is why bandit need not ask what may be opened.
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(address, timeout=5),  # nosec B310
        ):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


class WatchedPage:
    """A page of a local server, and what went wrong on it.

    Attributes:
        page: the Playwright page.
        external: addresses that were requested outside this machine.
        errors: errors of the page's scripts.
    """

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.external: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self._note(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _note(self, url: str) -> None:
        if not url.startswith((self.address, self.address.replace("http", "ws"), "data:", "blob:")):
            self.external.append(url)


class LabPage(WatchedPage):
    """A notebook open in JupyterLab."""

    def open(self, notebook: str) -> None:
        """Show a notebook and wait for its kernel."""
        self.page.goto(f"{self.address}/lab/tree/{notebook}?reset&token={TOKEN}")
        self.page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell", timeout=60_000)
        self.page.wait_for_function(_IDLE, timeout=60_000)

    def reload(self) -> None:
        """Load the page again; the kernel lives on."""
        self.page.reload()
        self.page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell", timeout=60_000)
        self.page.wait_for_function(_IDLE, timeout=60_000)

    def run_all(self, timeout_s: float) -> None:
        """Run all cells and wait for the last one; raises `RuntimeError` with the error of a cell that fails."""
        self.command("notebook:run-all-cells")
        self._wait_for_all(timeout_s)

    def _wait_for_all(self, timeout_s: float) -> None:
        result = self.page.wait_for_function(_ALL_RAN, timeout=timeout_s * 1e3).json_value()
        if result is not True:
            raise RuntimeError(f"a cell failed: {result}")

    def run_cell(self, text: str) -> None:
        """Run the cell that holds a text, and wait until the kernel is idle."""
        index = self.page.evaluate(
            "text => [...window.jupyterapp.shell.currentWidget.content.model.cells]"
            ".findIndex(cell => cell.sharedModel.getSource().includes(text))", text
        )  # fmt: skip
        self.page.evaluate("i => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = i }", index)
        self.command("notebook:run-cell")
        self.page.wait_for_function(_IDLE, timeout=60_000)

    def restart_and_run_all(self, timeout_s: float) -> None:
        """Restart the kernel, as the menu does it, and run all cells."""
        self.command("notebook:restart-run-all")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.wait_for_function(f"!({_ALL_RAN})()")
        self._wait_for_all(timeout_s)

    def command(self, name: str, **arguments: Any) -> None:
        """Run a JupyterLab command."""
        self.page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args) }", [name, arguments])

    def theme(self, name: str) -> None:
        """Switch to "JupyterLab Light" or "JupyterLab Dark"."""
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function(f"document.body.dataset.jpThemeName === '{name}'")

    def ask(self, code: str) -> str:
        """Run code in the kernel; what it printed."""
        return str(self.page.evaluate(_ASK, code))


@contextlib.contextmanager
def lab_page(folder: Path, *, width: int = 1500, height: int = 1100, scale: float = 1.0) -> Iterator[LabPage]:
    """JupyterLab on `folder` in a fresh browser window."""
    with jupyter_lab(folder) as address, browser_page(width, height, scale) as page:
        yield LabPage(page, address)


@contextlib.contextmanager
def browser_page(width: int = 1500, height: int = 1100, scale: float = 1.0) -> Iterator[Any]:
    """An empty Playwright page in a fresh browser window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), headless=True, args=list(FLAGS))
        try:
            page = browser.new_context(
                viewport={"width": width, "height": height}, device_scale_factor=scale
            ).new_page()
            page.set_default_timeout(30_000)
            yield page
        finally:
            browser.close()
