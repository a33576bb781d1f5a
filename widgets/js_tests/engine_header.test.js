import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import view, { stateText } from "../strata_widgets/engine_header/view.js";
import { rate } from "../strata_widgets/_shared.js";

let page;
beforeEach(() => {
  page = installPage();
});

const STATE = { model: "smollm2-135m", facts: [], state: "loading", task: "", fraction: -1, badge: "", problem: "", notes: [] };

test("progress is shown while it is known and taken away when it is not", () => {
  const model = new FakeModel({ ...STATE, task: "reading weights", fraction: 0.4 });
  const { el } = show(view, model);
  page.paint();
  const bar = el.find((node) => node.tag === "progress");
  assert.equal(bar.getAttribute("value"), "0.4");
  model.update({ task: "", fraction: -1, state: "ready" });
  page.paint();
  assert.equal(bar.getAttribute("value"), null);
  assert.equal(bar.classList.contains("idle"), true);
});

test("problems and facts are shown, and the view cleans up", () => {
  const facts = [{ label: "device", value: "cpu", tip: "Where it runs." }];
  const model = new FakeModel({ ...STATE, facts, badge: "", problem: "no such model", state: "failed" });
  const { el, cleanup } = show(view, model);
  page.paint();
  assert.match(el.textContent, /smollm2-135m.*Failed.*device cpu.*no such model/s);
  cleanup();
  assert.deepEqual(model.handlers, []);
});

test("states and rates are put into words", () => {
  assert.equal(stateText("ready", "", -1), "Ready");
  assert.equal(stateText("rebuilding", "packing weights", 0.4), "Rebuilding: packing weights, 40\u00a0%");
  assert.equal(stateText("loading", "importing", -1), "Loading: importing");
  assert.equal(stateText("loading", "loading weights as int4", 0.25), "Loading weights as int4, 25\u00a0%");
  assert.deepEqual([null, 0.123, 4.26, 42.04, 240.4, NaN].map(rate), ["–", "0.12", "4.3", "42.0", "240", "–"]);
});
