import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import view, { readout, summary, verdict } from "../strata_widgets/rate_chart/view.js";
import * as series from "../strata_widgets/rate_chart/series.js";

let page;
beforeEach(() => {
  page = installPage();
});

const steady = (from, to, stream, running = 2) => {
  const out = [];
  for (let i = Math.round(from * 10); i <= Math.round(to * 10); i += 1) {
    out.push({ t: i / 10, total: stream * running, stream, running });
  }
  return out;
};
const pack = (samples) => {
  const data = new DataView(new ArrayBuffer(32 * samples.length));
  samples.forEach((s, i) => [s.t, s.total, s.stream, s.running].forEach((v, j) => data.setFloat64(32 * i + 8 * j, v, true)));
  return data;
};

test("samples survive packing, also at an unaligned offset", () => {
  const samples = steady(0, 0.3, 40);
  const bytes = new Uint8Array(3 + 32 * samples.length);
  bytes.set(new Uint8Array(pack(samples).buffer), 3);
  assert.deepEqual(series.decode(new DataView(bytes.buffer, 3)), samples);
});

test("joining keeps the order, drops what is known and what is older than the span", () => {
  const joined = series.join(steady(0, 50, 40), steady(40, 70, 50));
  assert.equal(joined[0].t, 10);
  assert.equal(joined.at(-1).t, 70);
  assert.equal(joined.find((sample) => sample.t === 45).stream, 40);
  assert.deepEqual(joined.map((sample) => sample.t), joined.map((sample) => sample.t).toSorted((a, b) => a - b));
});

test("a line breaks where nothing was generating", () => {
  const samples = [...steady(0, 1, 40), ...steady(5, 6, 40), { t: 6.1, total: 5, stream: NaN, running: 0 }];
  assert.deepEqual(series.pieces(samples, "stream").map((piece) => piece.length), [11, 11]);
});

test("the axis is as short as holds the samples, in steps", () => {
  assert.equal(series.timeAxis(steady(0, 5, 1), []).span, 20);
  assert.equal(series.timeAxis(steady(0, 25, 1), []).span, 30);
  assert.equal(series.timeAxis(steady(0, 60, 1), [{ t: 61 }]).span, 60);
  assert.equal(series.timeAxis([], []).span, 20);
});

test("the effect of a change is the ratio of the means around it", () => {
  const marker = { t: 10, label: "cuda_graph on" };
  const samples = [...steady(0, 10, 40), ...steady(10.1, 11, 60), ...steady(11.1, 20, 80)];
  const { before, after, streams } = series.effect(samples, marker, [marker]);
  assert.deepEqual([before, after, streams].map(Math.round), [40, 80, 2]);
  assert.equal(verdict(samples, [marker]), "cuda_graph on: 40.0 → 80.0 tok/s per stream with 2 streams (×2.00)");
});

test("no effect is claimed when something else changed too", () => {
  const marker = { t: 10, label: "cuda_graph on" };
  const other = { t: 12, label: "fused_kernels on" };
  const samples = [...steady(0, 10, 40), ...steady(10.1, 20, 80)];
  assert.equal(series.effect(samples, marker, [marker, other]), null, "another change");
  const joined = [...steady(0, 10, 40, 2), ...steady(10.1, 20, 80, 3)];
  assert.equal(series.effect(joined, marker, [marker]), null, "another stream");
  assert.equal(series.effect(steady(9.8, 20, 40), marker, [marker]), null, "too little before");
});

test("labels that would overlap go to the second row or are left out", () => {
  const placed = series.placeLabels([{ x: 0, w: 80 }, { x: 20, w: 80 }, { x: 40, w: 80 }, { x: 590, w: 80 }], 640);
  assert.deepEqual(placed.map((label) => label.row), [0, 1, -1, 0]);
  assert.equal(placed[3].left, 560);
});

const STATE = { numbers: [{ label: "total", unit: "tok/s", line: "total", tip: "formula" }], values: [null], markers: [] };

test("the two speeds differ by dash, and a change is labelled", () => {
  const samples = steady(0, 20, 40);
  const markers = [{ t: 15, label: "cuda_graph on" }];
  const model = new FakeModel({ ...STATE, history: pack(samples), markers });
  const { el } = show(view, model);
  page.paint();
  const { drawing } = el.find((node) => node.tag === "canvas");
  assert.deepEqual(drawing.dashes, [[6, 4], [], [], []]);
  assert.ok(drawing.texts.includes("cuda_graph on"));
});

test("records extend what the history began, one draw per frame", () => {
  const model = new FakeModel({ ...STATE, history: pack(steady(0, 1, 40)) });
  const { el } = show(view, model);
  for (let i = 11; i < 30; i += 1) model.message({ records: [{ samples: 1 }] }, [pack(steady(i / 10, i / 10, 40))]);
  assert.equal(page.paint(), 1);
  const canvas = el.find((node) => node.tag === "canvas");
  assert.match(canvas.getAttribute("aria-valuetext"), /^Latest total 80.0 tok\/s, per stream 40.0 tok\/s/);
  canvas.fire("keydown", { key: "Home" });
  page.paint();
  assert.match(canvas.getAttribute("aria-valuetext"), /^2.9 s before the latest: total 80.0/);
  canvas.fire("keydown", { key: "Escape" });
  page.paint();
  assert.match(canvas.getAttribute("aria-valuetext"), /^Latest/);
});

test("an unknown number is a dash", () => {
  const model = new FakeModel({ ...STATE, history: new DataView(new ArrayBuffer(0)) });
  const { el } = show(view, model);
  page.paint();
  const value = el.find((node) => node.classes.has("value"));
  assert.equal(value.textContent, "–");
  model.update({ values: [1234.4] });
  page.paint();
  assert.equal(value.textContent, "1\u202f234");
});

test("cleanup removes listeners, observers and the pending frame", () => {
  const model = new FakeModel({ ...STATE, history: new DataView(new ArrayBuffer(0)) });
  const { cleanup } = show(view, model);
  assert.equal(page.observers.active, 3, "size, theme and sight");
  cleanup();
  assert.deepEqual([model.handlers.length, page.observers.active, page.pending()], [0, 0, 0]);
});

test("the chart is also told in words", () => {
  assert.equal(summary([], []), "No tokens in the last minute.");
  const [sample] = steady(3, 3, 40, 1);
  const near = [{ t: 3.2, label: "cuda_graph off" }];
  assert.equal(readout(sample, 5, near), "2.0 s before the latest: total 40.0, per stream 40.0 tok/s, 1 stream; cuda_graph off");
});
