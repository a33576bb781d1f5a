import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import view, { stepText } from "../strata_widgets/step_timeline/view.js";
import { KEPT, ceilingOf, decodeSteps, joinSteps, means, millis } from "../strata_widgets/step_timeline/steps.js";

let page;
beforeEach(() => {
  page = installPage();
});

const CAUSES = [
  { key: "weights", label: "reading weights", tip: "formula of weights" },
  { key: "compute", label: "launch, arithmetic", tip: "t" },
];
const step = (number, weights, compute, prefill = 0) => ({ step: number, whole: weights + compute, prefill, decode: prefill ? 0 : 2, parts: [weights, compute] });
const pack = (steps) => {
  const data = new DataView(new ArrayBuffer(48 * steps.length));
  steps.forEach((s, i) => [s.step, s.whole, s.prefill, s.decode, ...s.parts].forEach((v, j) => data.setFloat64(48 * i + 8 * j, v, true)));
  return data;
};

test("steps survive packing, also at an unaligned offset", () => {
  const steps = [step(7, 2, 3), step(8, 2, 4, 64)];
  const bytes = new Uint8Array(3 + 96);
  bytes.set(new Uint8Array(pack(steps).buffer), 3);
  assert.deepEqual(decodeSteps(new DataView(bytes.buffer, 3), 2), steps);
});

test("joining drops what is known and keeps the latest", () => {
  const first = Array.from({ length: KEPT }, (_, i) => step(i, 1, 1));
  const joined = joinSteps(first, [step(KEPT - 1, 9, 9), step(KEPT, 1, 1)]);
  assert.deepEqual([joined.length, joined[0].step, joined.at(-1).step, joined.at(-2).whole], [KEPT, 1, KEPT, 2]);
});

test("means are over decode steps, which prompts do not distort", () => {
  const mean = means([step(0, 2, 2), step(1, 4, 4), step(2, 2, 200, 512)]);
  assert.deepEqual([mean.count, mean.whole, mean.parts], [2, 6, [3, 3]]);
  assert.equal(means([step(2, 2, 200, 512)]).only, "steps");
  assert.equal(means([]), null);
});

test("one very long step does not flatten the others", () => {
  assert.equal(ceilingOf([step(0, 1, 1), step(1, 1, 1), step(2, 1, 999)]), 8);
  assert.equal(ceilingOf([step(0, 1, 1), step(1, 1, 2)]), 3);
});

test("milliseconds have units that suit them", () => {
  assert.deepEqual([0, 0.04, 1.234, 18.26, 240.4].map(millis), ["0 µs", "40 µs", "1.23 ms", "18.3 ms", "240 ms"]);
});

test("parts are stacked to the height of the whole, and every cause shows its formula", () => {
  const model = new FakeModel({ causes: CAUSES, history: pack([step(0, 2, 2)]), note: "" });
  const { el, cleanup } = show(view, model);
  page.paint();
  const canvas = el.find((node) => node.tag === "canvas");
  const [low, high] = canvas.drawing.rects;
  assert.ok(Math.abs(low.y - (high.y + high.height)) < 1e-9, "no gap, no overlap");
  assert.ok(Math.abs(low.height - high.height) < 1e-9);
  assert.match(el.textContent, /formula of weights/);
  assert.match(el.textContent, /4.00 ms a step/);
  canvas.fire("keydown", { key: "ArrowLeft" });
  page.paint();
  assert.equal(canvas.getAttribute("aria-valuetext"), stepText(step(0, 2, 2), CAUSES));
  cleanup();
  assert.deepEqual([model.handlers.length, page.observers.active, page.pending()], [0, 0, 0]);
});

test("records add steps, one draw per frame", () => {
  const model = new FakeModel({ causes: CAUSES, history: new DataView(new ArrayBuffer(0)), note: "n" });
  const { el } = show(view, model);
  page.paint();
  assert.match(el.textContent, /Press Generate/);
  for (let i = 0; i < 9; i += 1) model.message({ records: [{ steps: 1 }] }, [pack([step(i, 1, 1)])]);
  assert.equal(page.paint(), 1);
  assert.match(el.textContent, /Means over the last 9 decode steps/);
});
