import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeModel, installPage, show } from "./fake_page.js";
import view, { changesOf, explanation, lineOf, parseNumber, words } from "../strata_widgets/toggle_panel/view.js";

const common = { topic: "Speed", doc: "What it is.", choices: [], optional: false, cost: "live", lossless: true, effect: "What it does." };
const GRAPH = { ...common, name: "cuda_graph", kind: "bool", value: true, default: true, off: false };
const FORMAT = { ...common, name: "weight_format", kind: "choice", choices: ["bf16", "int4"], value: "bf16", default: null };
Object.assign(FORMAT, { off: "bf16", cost: "rebuild", lossless: false });
const SEQS = { ...common, name: "max_num_seqs", kind: "int", value: 16, default: 16, off: 16, topic: "Many requests" };

let page;
beforeEach(() => {
  page = installPage();
});

function open() {
  const model = new FakeModel({ toggles: [GRAPH, FORMAT, SEQS], busy: {}, answers: {}, enabled: true });
  const shown = show(view, model);
  page.paint();
  const input = (name) => shown.el.find((node) => node.attributes.id?.includes(`-${name}-`) && "data-lm-suppress-shortcuts" in node.attributes);
  const line = (name) => shown.el.find((node) => node.attributes.id?.includes(`-${name}-`) && node.attributes.id.endsWith("-line"));
  return { model, ...shown, input, line };
}

test("a click asks and the switch keeps the value in force until the answer", () => {
  const { model, input, line } = open();
  const prevented = input("cuda_graph").fire("click");
  page.paint();
  assert.equal(prevented, true);
  assert.deepEqual(model.sent, [{ kind: "set", name: "cuda_graph", value: false }]);
  assert.equal(input("cuda_graph").checked, true);
  assert.match(line("cuda_graph").textContent, /asked for off/);
  model.update({ busy: { cuda_graph: false } });
  page.paint();
  assert.equal(input("cuda_graph").checked, true);
  assert.equal(input("cuda_graph").getAttribute("aria-busy"), "true");
  const answers = { cuda_graph: { status: "applied", text: "Now off.", number: 1 } };
  model.update({ toggles: [{ ...GRAPH, value: false }, FORMAT, SEQS], busy: {}, answers });
  page.paint();
  assert.equal(input("cuda_graph").checked, false);
  assert.equal(line("cuda_graph").textContent, "Now off.");
});

test("a refused choice snaps back and says why", () => {
  const { model, el, input, line } = open();
  const select = input("weight_format");
  select.value = "int4";
  select.fire("change");
  assert.equal(select.value, "bf16");
  model.update({ answers: { weight_format: { status: "refused", text: "Refused: no.", number: 1 } } });
  page.paint();
  assert.equal(select.value, "bf16");
  assert.equal(line("weight_format").textContent, "Refused: no.");
  const status = el.find((node) => node.attributes["aria-live"] === "polite");
  assert.equal(status.textContent, "weight_format: Refused: no.");
});

test("a number field refuses what is no number without asking the kernel", () => {
  const { model, input, line } = open();
  const field = input("max_num_seqs");
  field.value = "many";
  field.fire("change");
  page.paint();
  assert.deepEqual(model.sent, []);
  assert.equal(field.value, "16");
  assert.match(line("max_num_seqs").textContent, /“many” is not a whole number/);
  field.value = "8";
  field.fire("keydown", { key: "Enter" });
  field.fire("change");
  assert.deepEqual(model.sent, [{ kind: "set", name: "max_num_seqs", value: 8 }]);
});

test("an earlier answer that was good gives way to the latest, a refusal stays", () => {
  const { model, line } = open();
  const answer = (status, number) => ({ status, text: status, number });
  model.update({ answers: { cuda_graph: answer("applied", 1), weight_format: answer("refused", 2), max_num_seqs: answer("applied", 3) } });
  page.paint();
  assert.equal(line("cuda_graph").textContent, "What it does.");
  assert.equal(line("weight_format").textContent, "refused");
  assert.equal(line("max_num_seqs").textContent, "applied");
});

test("cleanup removes every listener and stops drawing", () => {
  const { model, cleanup } = open();
  model.update({ enabled: false });
  cleanup();
  assert.deepEqual(model.handlers, []);
  assert.equal(page.pending(), 0);
});

test("two views of one model show the same and clean up on their own", () => {
  const { model, cleanup } = open();
  const second = show(view, model);
  cleanup();
  model.update({ toggles: [{ ...GRAPH, value: false }, FORMAT, SEQS] });
  page.paint();
  const box = second.el.find((node) => node.attributes.role === "switch");
  assert.equal(box.checked, false);
});

test("values, numbers and lines are put into words", () => {
  assert.deepEqual([true, false, null, "int4", 512].map(words), ["on", "off", "auto", "int4", "512"]);
  const int = { kind: "int", optional: false };
  assert.deepEqual(["8", " 8 ", "8.5", "x", ""].map((text) => parseNumber(text, int)), [8, 8, undefined, undefined, undefined]);
  assert.equal(parseNumber("", { kind: "int", optional: true }), null);
  assert.equal(parseNumber("0.5", { kind: "float", optional: false }), 0.5);
  assert.deepEqual(lineOf(GRAPH, { busy: false }), { text: "switching to off …", tone: "busy" });
  assert.equal(explanation(FORMAT)[1], "Changes the numbers, so tokens may differ. Rebuilds weights or memory while the engine goes on, then swaps. Default auto, off is bf16.");
});

test("the first topic is always on the page, the others are folded and tell how many of theirs were changed", () => {
  const { model, el } = open();
  const [section, folded] = ["section", "details"].map((tag) => el.all((node) => node.tag === tag));
  assert.equal(section.length, 1);
  assert.match(section[0].textContent, /^Speed.*cuda_graph.*weight_format/);
  assert.equal(folded.length, 1);
  const summary = folded[0].find((node) => node.tag === "summary");
  assert.equal(summary.textContent.trim(), "Many requests");
  model.update({ toggles: [GRAPH, FORMAT, { ...SEQS, value: 8 }] });
  page.paint();
  assert.equal(summary.textContent, "Many requests 1 changed");
  assert.equal(changesOf([FORMAT]), "", "what a model decides is no change");
});
