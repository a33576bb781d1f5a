import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import view, { stageText, times } from "../strata_widgets/climb_chart/view.js";

let page;
beforeEach(() => {
  page = installPage();
});

const stage = (label, median, more = {}) => ({ label, low: median - 2, median, high: median + 2, before: null, baseline: null, kept: true, tip: "formula", ...more });
const STATE = { unit: "tok/s", source: "toggled", claims: [{ label: "start", detail: "start", value: 58 }, { label: "spec", detail: "speculative", value: 240 }], claims_note: "Claimed.", can_restart: true };

test("a stage is told with its spread, its ratios and its fate", () => {
  assert.equal(stageText(stage("start", 40), "tok/s"), "start: 40.0 tok/s, from 38.0 to 42.0");
  const text = stageText(stage("int4", 60, { before: 1.2, baseline: 1.5, kept: false }), "tok/s");
  assert.equal(text, "int4: 60.0 tok/s, from 58.0 to 62.0, ×1.20 the stage before, ×1.50 the first; taken back");
  assert.equal(times(null), "");
});

test("heights are in proportion, and the claim has a scale of its own", () => {
  const model = new FakeModel({ ...STATE, stages: [stage("start", 40), stage("cuda_graph on", 78)] });
  const { el } = show(view, model);
  page.paint();
  const bars = el.all((node) => node.classes.has("bar")).map((node) => parseFloat(node.style.height));
  assert.deepEqual(bars.map((height) => Math.round(height)), [50, 98, 24, 100]);
  assert.match(el.textContent, /formula/);
  assert.ok(el.all((node) => node.classes.has("whisker")).length === 2, "claims have no spread");
});

test("without a measurement it says what to do, and starting over is asked for", () => {
  const model = new FakeModel({ ...STATE, stages: [] });
  const { el, cleanup } = show(view, model);
  page.paint();
  const button = el.find((node) => node.tag === "button");
  assert.equal(button.hidden, true);
  assert.equal(el.find((node) => node.classes.has("s-empty")).hidden, false);
  model.update({ stages: [stage("start", 40)] });
  page.paint();
  assert.equal(button.hidden, false);
  button.fire("click");
  assert.deepEqual(model.sent, [{ kind: "restart" }]);
  cleanup();
  assert.deepEqual([model.handlers.length, page.pending()], [0, 0]);
});
