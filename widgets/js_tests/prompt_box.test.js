import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import view, { fieldValue } from "../strata_widgets/prompt_box/view.js";

let page;
beforeEach(() => {
  page = installPage();
});

const STATE = { prompt: "Hello", num_streams: 1, max_tokens: 64, temperature: 0.5, chat: true, can_chat: true };

function open(state = {}) {
  const model = new FakeModel({ ...STATE, enabled: true, num_unfinished: 0, answer: {}, ...state });
  const shown = show(view, model);
  page.paint();
  const one = (test) => shown.el.find(test);
  const text = one((node) => node.tag === "textarea");
  const [generate, stop] = ["generate", "stop"].map((name) => one((node) => node.classes.has(name)));
  const problem = one((node) => node.classes.has("problem"));
  const field = (name) => one((node) => node.tag === "input" && node.attributes.id?.endsWith(name));
  return { model, ...shown, text, generate, stop, problem, field };
}

test("Ctrl+Enter sends what is in the fields", () => {
  const { model, text, field } = open();
  text.value = "Why?";
  field("num_streams").value = "4";
  assert.equal(text.fire("keydown", { key: "Enter", ctrlKey: true }), true);
  const fields = { prompt: "Why?", num_streams: 4, max_tokens: 64, temperature: 0.5, chat: true };
  assert.deepEqual(model.sent, [{ kind: "generate", fields }]);
  assert.equal(model.get("prompt"), "Why?");
  assert.equal(text.fire("keydown", { key: "Enter" }), false, "Enter alone makes a new line");
});

test("an error is shown in words and nothing that was typed is lost", () => {
  const { model, text, generate, problem, field } = open();
  text.value = "A prompt";
  field("max_tokens").value = "-3";
  generate.fire("click");
  page.paint();
  assert.equal(generate.disabled, true);
  assert.equal(generate.textContent, "Waiting for the kernel");
  model.update({ answer: { number: 1, ok: false, text: "max_tokens=-3 must be at least 1; try 256" } });
  page.paint();
  assert.equal(problem.textContent, "max_tokens=-3 must be at least 1; try 256");
  assert.equal(problem.hidden, false);
  assert.equal(text.value, "A prompt");
  assert.equal(field("max_tokens").value, "-3");
  assert.equal(generate.disabled, false);
});

test("Stop works only while something runs", () => {
  const { model, stop } = open();
  assert.equal(stop.disabled, true);
  model.update({ num_unfinished: 2 });
  page.paint();
  assert.equal(stop.disabled, false);
  stop.fire("click");
  assert.deepEqual(model.sent, [{ kind: "stop" }]);
});

test("nothing is sent without an engine", () => {
  const { model, generate, text } = open({ enabled: false });
  assert.equal(generate.disabled, true);
  text.fire("keydown", { key: "Enter", ctrlKey: true });
  assert.deepEqual(model.sent, []);
});

test("half-typed numbers stay on the page", () => {
  const { model, field } = open();
  field("max_tokens").value = "12x";
  field("max_tokens").fire("change");
  assert.equal(model.get("max_tokens"), 64);
  assert.deepEqual([fieldValue("12"), fieldValue("0.7"), fieldValue(""), fieldValue("12x")], [12, 0.7, "", "12x"]);
});

test("cleanup removes every listener", () => {
  const { model, cleanup } = open();
  cleanup();
  assert.deepEqual(model.handlers, []);
  assert.equal(page.pending(), 0);
});
