import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import batchLanes, { requestText, widths } from "../strata_widgets/batch_lanes/view.js";
import blockMap, { cellText, layout } from "../strata_widgets/block_map/view.js";
import detailBar from "../strata_widgets/detail_bar/view.js";
import draftLanes, { roundText, visible } from "../strata_widgets/draft_lanes/view.js";
import expertMap, { cellText as cellExpert, depth, layerText, layout as layoutExperts } from "../strata_widgets/expert_map/view.js";
import hardwareStrip from "../strata_widgets/hardware_strip/view.js";
import qualityChart, { nearestPoint } from "../strata_widgets/quality_chart/view.js";
import rooflineGauge, { shareText } from "../strata_widgets/roofline_gauge/view.js";
import loadPanel from "../strata_widgets/load_panel/view.js";

let page;
beforeEach(() => {
  page = installPage();
});

const byClass = (el, name) => el.find((node) => node.classes.has(name));
const empty = () => new DataView(new ArrayBuffer(0));

test("the map takes the largest squares that fit", () => {
  assert.deepEqual(layout(100, 640), { size: 14, columns: 45, height: 42 });
  const large = layout(8192, 640);
  assert.ok(large.size < 6 && large.columns * large.size <= 640);
});

test("a block is told in words, whoever holds it", () => {
  const cells = [0, 1, 2, 3];
  const owners = [{ title: "Stream 1", color: 0 }];
  const texts = cells.map((_, i) => cellText(cells, i, owners, 1, 16));
  assert.match(texts[0], /^block 0: free/);
  assert.match(texts[1], /prefix cache/);
  assert.match(texts[2], /shared/);
  assert.match(texts[3], /held by Stream 1/);
  assert.match(cellText(cells, 1, owners, 4, 16), /^blocks 4 to 7/);
});

test("the map draws one square per block, and reads them by keyboard", () => {
  const cells = new DataView(Uint8Array.from([0, 1, 2, 3]).buffer);
  const kinds = [{ key: "own", label: "held by one", count: 1, tip: "t" }];
  const model = new FakeModel({ cells, per_cell: 1, block_size: 16, owners: [{ title: "Stream 1", color: 0 }], kinds });
  const { el, cleanup } = show(blockMap, model);
  page.paint();
  const canvas = el.find((node) => node.tag === "canvas");
  assert.equal(canvas.drawing.rects.filter(({ width }) => width > 4).length, 4);
  assert.equal(canvas.getAttribute("aria-valuetext"), "held by one 1");
  canvas.fire("keydown", { key: "End" });
  page.paint();
  assert.match(canvas.getAttribute("aria-valuetext"), /block 3: held by Stream 1/);
  cleanup();
  assert.deepEqual([model.handlers.length, page.observers.active, page.pending()], [0, 0, 0]);
});

const REQUEST = { id: "a", title: "Stream 1", color: 2, state: "prefilling", prompt: 100, output: 0, computed: 40, cached: 16, blocks: 3, priority: 0, preemptions: 1 };

test("a request's bar shows what is computed, what is not, and what came out", () => {
  assert.deepEqual(widths({ prompt: 100, output: 100, computed: 50 }, 400), { done: 12.5, todo: 12.5, output: 25 });
  const text = requestText(REQUEST);
  assert.match(text, /Stream 1: prefilling, 40 of 100 tokens/);
  assert.match(text, /16 prompt tokens came from the prefix cache, preempted 1 times/);
});

test("lanes come and go with the requests, and an empty batch says what to do", () => {
  const model = new FakeModel({ requests: [REQUEST, { ...REQUEST, id: "b", state: "waiting" }], num_more: 3, totals: [{ label: "waiting", value: 1, tip: "formula" }] });
  const { el } = show(batchLanes, model);
  page.paint();
  assert.deepEqual(el.all((node) => node.classes.has("lane")).map((node) => node.getAttribute("data-state")), ["prefilling", "waiting"]);
  assert.match(el.textContent, /and 3 more/);
  assert.match(el.textContent, /formula/);
  model.update({ requests: [], num_more: 0 });
  page.paint();
  assert.equal(el.all((node) => node.classes.has("lane")).length, 0);
  assert.equal(byClass(el, "s-empty").hidden, false);
});

test("a panel is asked for, and the button tells whether it is open", () => {
  const model = new FakeModel({ panels: [{ name: "causes", title: "Causes", tip: "t" }, { name: "blocks", title: "Blocks", tip: "t" }], shown: ["causes"], note: "Experts: none" });
  const { el } = show(detailBar, model);
  page.paint();
  const [causes, blocks] = el.all((node) => node.tag === "button");
  assert.deepEqual([causes, blocks].map((node) => node.getAttribute("aria-expanded")), ["true", "false"]);
  blocks.fire("click");
  causes.fire("click");
  assert.deepEqual(model.sent, [{ kind: "open", name: "blocks", open: true }, { kind: "open", name: "causes", open: false }]);
  assert.equal(byClass(el, "note").textContent, "Experts: none");
  assert.equal(causes.getAttribute("aria-expanded"), "true", "only the kernel opens and closes");
});

test("proposals are told in words, blanks included", () => {
  assert.equal(visible(" a\n"), "·a⏎");
  assert.equal(roundText({ accepted: ["a"], rejected: ["b", "c"] }), "1 of 3 proposed tokens taken; “b” was not what the model says");
  const model = new FakeModel({ lanes: [{ id: "a", title: "Stream 1", color: 0, rounds: [{ accepted: ["<b>"], rejected: ["x"] }] }], by_position: [{ position: 1, drafted: 4, accepted: 3 }], numbers: [], note: "" });
  const { el } = show(draftLanes, model);
  page.paint();
  assert.equal(byClass(el, "yes").textContent, "<b>");
  assert.equal(byClass(el, "no").textContent, "x");
  assert.equal(byClass(el, "percent").textContent, "75 %");
});

test("a reading that is too high is told by a word", () => {
  const reading = { label: "temperature", value: "91", unit: "°C", tone: "bad", tip: "Core" };
  const { el } = show(hardwareStrip, new FakeModel({ readings: [reading, { ...reading, tone: "", value: "no sensor", unit: "" }], note: "n" }));
  page.paint();
  const numbers = el.all((node) => node.classes.has("number")).map((node) => node.textContent);
  assert.deepEqual(numbers, ["91 °C (too high)", "no sensor"]);
});

test("the nearest point is found within reach only", () => {
  const points = [{ x: 50, y: 0.1 }, { x: 100, y: 0.01 }];
  assert.equal(nearestPoint([], 640, 0, 0), -1);
  assert.equal(nearestPoint(points, 640, 0, 0), -1);
  assert.equal(nearestPoint(points, 640, 300, 50, 1e4), 0);
  const model = new FakeModel({ points: points.map((p) => ({ ...p, label: "int8", best: true, tip: "from a file" })), x_label: "tok/s", y_label: "KL", note: "" });
  const { el } = show(qualityChart, model);
  page.paint();
  const canvas = el.find((node) => node.tag === "canvas");
  assert.ok(canvas.drawing.texts.includes("int8"));
  canvas.fire("keydown", { key: "Home" });
  page.paint();
  assert.equal(canvas.getAttribute("aria-valuetext"), "int8: from a file");
});

test("a share above the roofline is shown as wrong, an unknown one as a dash with a way to measure", () => {
  assert.deepEqual([0.624, null, NaN].map(shareText), ["62 %", "–", "–"]);
  const state = { share: null, share_tip: "formula", numbers: [{ label: "reads now", unit: "GB/s", tip: "t" }], values: [null], can_measure: true, busy: false, note: "n" };
  const model = new FakeModel(state);
  const { el } = show(rooflineGauge, model);
  page.paint();
  const button = el.find((node) => node.tag === "button");
  button.fire("click");
  assert.deepEqual(model.sent, [{ kind: "measure" }]);
  assert.equal(byClass(el, "share").textContent, "–");
  model.update({ share: 1.2, can_measure: false, values: [25.3] });
  page.paint();
  assert.ok(el.classes.has("wrong"));
  assert.equal(byClass(el, "fill").style.width, "100%");
  assert.equal(button.hidden, true);
  assert.equal(byClass(el, "value").textContent, "25.3");
});

test("load is sent by name, and the answer is told", () => {
  const model = new FakeModel({ loads: [{ name: "A", label: "Article A", tip: "t" }], enabled: true, num_unfinished: 0, answer: {} });
  const { el } = show(loadPanel, model);
  page.paint();
  const [load, stop] = el.all((node) => node.tag === "button");
  assert.equal(stop.disabled, true);
  load.fire("click");
  model.update({ num_unfinished: 4, answer: { ok: false, text: "too long" } });
  page.paint();
  stop.fire("click");
  assert.deepEqual(model.sent, [{ kind: "load", name: "A" }, { kind: "stop" }]);
  assert.equal(byClass(el, "answer").textContent, "too long");
  assert.ok(byClass(el, "answer").classes.has("bad"));
});

const COUNTS = [6, 2, 0, 0, 2, 2, 2, 2]; // two layers of four experts, two of them a token

test("an expert is told with its count, its share and the formula of that", () => {
  assert.match(cellExpert(COUNTS, 0, 4, 2), /^layer 0, expert 0: chosen 6 times, share 75\.0 % = 6 \/ \(4 tokens × 2 experts a token\); an even share is 25\.0 %/);
  assert.match(cellExpert([0, 0], 1, 2, 1), /share –/);
  assert.equal(layerText(COUNTS.slice(0, 4), 0), "layer 0: most to expert 0, 75.0 %; 2 never chosen");
  assert.equal(layerText([0, 0], 3), "layer 3: nothing yet");
});

test("a cell is as dark as its share, up to three even shares", () => {
  assert.deepEqual([depth(0, 8, 4), depth(2, 8, 4), depth(8, 8, 4), depth(0, 0, 4)], [0, 1 / 3, 1, 0]);
  const wide = layoutExperts(40, 64, 700);
  assert.ok(wide.cellWidth * 64 <= 700 && wide.height <= 340);
});

test("the heat map draws every expert, is read by keyboard and in words, and leaves nothing behind", () => {
  const bytes = new Float64Array([0, ...COUNTS]).buffer; // begins at an offset, as buffers from a kernel may
  const numbers = [{ label: "tokens", value: "4", tip: "formula" }];
  const model = new FakeModel({ counts: new DataView(bytes, 8), num_layers: 2, num_experts: 4, top_k: 2, numbers, note: "", enabled: true });
  const { el, cleanup } = show(expertMap, model);
  page.paint();
  const canvas = el.find((node) => node.tag === "canvas");
  assert.equal(canvas.drawing.rects.length, 8);
  assert.equal(canvas.getAttribute("aria-valuetext"), "tokens 4");
  for (const key of ["Home", "ArrowDown", "ArrowRight"]) canvas.fire("keydown", { key });
  page.paint();
  assert.match(canvas.getAttribute("aria-valuetext"), /^layer 1, expert 1: chosen 2 times/);
  const words = el.find((node) => node.tag === "details");
  words.open = true;
  words.fire("toggle");
  page.paint();
  assert.deepEqual(words.all((node) => node.tag === "li").map((node) => node.textContent.slice(0, 9)), ["layer 0: ", "layer 1: "]);
  el.find((node) => node.tag === "button").fire("click");
  assert.deepEqual(model.sent, [{ kind: "restart" }]);
  cleanup();
  assert.deepEqual([model.handlers.length, page.observers.active, page.pending()], [0, 0, 0]);
});

test("without counts there is no map, only the reason", () => {
  const model = new FakeModel({ counts: empty(), num_layers: 0, num_experts: 0, top_k: 0, numbers: [], note: "None: this model is dense.", enabled: false });
  const { el } = show(expertMap, model);
  page.paint();
  assert.equal(el.find((node) => node.tag === "figure").hidden, true);
  assert.match(el.textContent, /None: this model is dense\./);
});
