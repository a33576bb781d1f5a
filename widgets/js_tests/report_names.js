/** Prints which traits a view reads and listens to, for tests/test_widgets.py: node report_names.js <view.js> <state> */
import { pathToFileURL } from "node:url";
import { FakeModel, installPage, show } from "./fake_page.js";

const [viewPath, stateText] = process.argv.slice(2);
const page = installPage();
const { default: view } = await import(pathToFileURL(viewPath));

const read = new Set();
class Watched extends FakeModel {
  get(name) {
    read.add(name);
    return super.get(name);
  }
}

const state = JSON.parse(stateText, (_key, value) => (value === "__bytes__" ? new DataView(new ArrayBuffer(0)) : value));
const model = new Watched(state);
const { el } = show(view, model);
page.paint();
const heard = model.handlers.map(([event]) => event);
const inputs = el.all((node) => ["input", "select", "textarea", "button", "canvas"].includes(node.tag));
const loud = inputs.filter((node) => node.attributes["data-lm-suppress-shortcuts"] !== "true").map((node) => node.tag);
console.log(JSON.stringify({ read: [...read], heard, loud, inputs: inputs.length }));
