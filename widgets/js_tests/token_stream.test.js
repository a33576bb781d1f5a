import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import view, { KEPT, Texts, statusOf } from "../strata_widgets/token_stream/view.js";

let page;
beforeEach(() => {
  page = installPage();
});

const lane = (id, more = {}) => {
  const given = { title: `Stream ${id}`, prompt: "Hi", state: "generating", note: "", num_tokens: 3, rate: 41.26 };
  return { id, ...given, ...more };
};
const piece = (id, start, text) => ({ id, start, end: start + text.length, text });
const large = (el) => el.find((node) => node.classes.has("text"));

test("pieces grow the text and a piece after a gap waits for the snapshot", () => {
  const texts = new Texts();
  texts.append(piece("a", 0, "one "));
  texts.append(piece("a", 4, "two "));
  texts.append(piece("a", 14, "four"));
  assert.equal(texts.text("a"), "one two ");
  texts.repair([{ id: "a", end: 14, text: "one two three " }], new Set(["a"]));
  texts.append(piece("a", 14, "four"));
  assert.equal(texts.text("a"), "one two three four");
});

test("an older snapshot never takes text back, and lanes that are gone are forgotten", () => {
  const texts = new Texts();
  texts.append(piece("a", 0, "one two"));
  texts.repair([{ id: "a", end: 3, text: "one" }], new Set(["a"]));
  assert.equal(texts.text("a"), "one two");
  texts.repair([], new Set());
  assert.equal(texts.text("a"), "");
});

test("a lane keeps a bounded text", () => {
  const texts = new Texts();
  for (let i = 0; i < 30; i += 1) texts.append(piece("a", i * 1000, "x".repeat(1000)));
  assert.equal(texts.text("a").length, KEPT);
});

test("model text is shown as text, whatever it looks like", () => {
  const model = new FakeModel({ lanes: [lane("a")], snapshot: [] });
  const { el } = show(view, model);
  model.message({ records: [{ append: [piece("a", 0, "<img src=x onerror=alert(1)>")] }] });
  page.paint();
  assert.equal(large(el).textContent, "<img src=x onerror=alert(1)>");
  assert.equal(el.all((node) => node.tag === "img").length, 0);
});

test("growing text extends the same text node, so a selection survives", () => {
  const model = new FakeModel({ lanes: [lane("a")], snapshot: [] });
  const { el } = show(view, model);
  model.message({ records: [{ append: [piece("a", 0, "one ")] }] });
  page.paint();
  const node = large(el).childNodes[0];
  model.message({ records: [{ append: [piece("a", 4, "two")] }] });
  page.paint();
  assert.equal(large(el).childNodes[0], node);
  assert.equal(node.data, "one two");
});

test("the first lane is large, and choosing another swaps them", () => {
  const model = new FakeModel({ lanes: [lane("a"), lane("b"), lane("c")], snapshot: [] });
  const { el } = show(view, model);
  model.message({ records: [{ append: [piece("a", 0, "text a"), piece("b", 0, "text b")] }] });
  page.paint();
  const small = () => el.all((node) => node.classes.has("small"));
  assert.equal(large(el).textContent, "text a");
  assert.equal(small().length, 2);
  small()[0].fire("click");
  page.paint();
  assert.equal(large(el).textContent, "text b");
  model.update({ lanes: [lane("a")] });
  page.paint();
  assert.equal(large(el).textContent, "text a");
  assert.equal(small().length, 0);
});

test("a view that opens late starts from the snapshot", () => {
  const model = new FakeModel({ lanes: [lane("a")], snapshot: [{ id: "a", end: 5, text: "hello" }] });
  const { el, cleanup } = show(view, model);
  page.paint();
  assert.equal(large(el).textContent, "hello");
  cleanup();
  assert.deepEqual(model.handlers, []);
});

test("a lane's state is put into words", () => {
  assert.equal(statusOf(lane("a")), "3 tokens · 41.3 tok/s");
  assert.equal(statusOf(lane("a", { num_tokens: 1, rate: null, note: "stopped" })), "1 token · stopped");
  assert.equal(statusOf(lane("a", { state: "waiting" })), "waiting");
});

test("what a drafter proposed keeps its place when the beginning of a long text is dropped", () => {
  const texts = new Texts();
  texts.append({ id: "a", start: 0, end: 4, text: "abcd", drafted: [[1, 3]] });
  assert.deepEqual(texts.drafted("a"), [[1, 3]]);
  texts.append({ id: "a", start: 4, end: 4 + KEPT - 2, text: "x".repeat(KEPT - 2), drafted: [[10, 12]] });
  assert.deepEqual(texts.drafted("a"), [[0, 1], [8, 10]]);
  assert.deepEqual(texts.drafted("nobody"), []);
});

test("phase and acceptance are told in words", () => {
  assert.equal(statusOf({ state: "waiting", phase: "prefilling", num_tokens: 0 }), "prefilling");
  assert.equal(statusOf({ state: "generating", phase: "decoding", num_tokens: 4, accepted: 0.626 }), "4 tokens · 63 % of proposals taken");
  assert.equal(statusOf({ state: "generating", phase: "preempted", num_tokens: 4 }), "4 tokens · preempted");
});
