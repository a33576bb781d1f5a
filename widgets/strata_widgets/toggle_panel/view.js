/** One control per toggle. A control shows the value in force; a click asks, and only the answer moves it. */
import { freshId, h, painter, quiet, setText, wire } from "../_shared.js";

const COSTS = {
  live: "Changes between two steps.",
  rebuild: "Rebuilds weights or memory while the engine goes on, then swaps.",
};

/** A value in words: on, off, auto, int4, 512. */
export function words(value) {
  if (value === true) return "on";
  if (value === false) return "off";
  return value == null ? "auto" : String(value);
}

/** What a number field holds: a number, null for empty where that is legal, undefined for anything else. */
export function parseNumber(text, { kind, optional }) {
  const trimmed = text.trim();
  if (!trimmed) return optional ? null : undefined;
  const value = Number(trimmed);
  if (!Number.isFinite(value) || (kind === "int" && !Number.isInteger(value))) return undefined;
  return value;
}

/** The line under a control, and whether it is good or bad news. */
export function lineOf(toggle, { asked, busy, answer, latest, local }) {
  if (busy !== undefined) return { text: `switching to ${words(busy)} …`, tone: "busy" };
  if (asked !== undefined) return { text: `asked for ${words(asked)}, waiting for the kernel`, tone: "busy" };
  if (local) return { text: local, tone: "bad" };
  if (answer?.status === "refused") return { text: answer.text, tone: "bad" };
  if (answer && answer.number === latest) return { text: answer.text, tone: "good" };
  return { text: toggle.effect, tone: "" };
}

/** "2 changed": how many have another value than their default, where they have one before a model is loaded. */
export function changesOf(toggles) {
  const changed = toggles.filter(({ value, default: usual }) => usual !== null && value !== usual).length;
  return changed ? `${changed} changed` : "";
}

/** The full explanation, for the tooltip. */
export function explanation(toggle) {
  const traits = [toggle.lossless ? "Same tokens either way." : "Changes the numbers, so tokens may differ."];
  traits.push(COSTS[toggle.cost], `Default ${words(toggle.default)}, off is ${words(toggle.off)}.`);
  return [toggle.doc, traits.join(" "), toggle.effect && `Here: ${toggle.effect}`].filter(Boolean);
}

function control(toggle, id, ask, complain) {
  const shared = { id, ...quiet, "aria-describedby": `${id}-line ${id}-tip` };
  if (toggle.kind === "bool") {
    const box = h("input", { ...shared, type: "checkbox", role: "switch" });
    box.addEventListener("click", (event) => {
      event.preventDefault(); // the control moves when the engine has answered
      ask(!box.inForce);
    });
    return box;
  }
  if (toggle.kind === "choice") {
    const undecided = h("option", { value: "", hidden: true }, words(null)); // shown until a model is loaded
    const options = toggle.choices.map((choice) => h("option", { value: choice }, choice));
    const select = h("select", shared, undecided, ...options);
    select.addEventListener("change", () => {
      const wanted = select.value;
      select.value = select.inForce ?? "";
      ask(wanted);
    });
    return select;
  }
  const placeholder = toggle.optional ? "auto" : "";
  const field = h("input", { ...shared, type: "text", inputmode: "decimal", autocomplete: "off", placeholder });
  const commit = () => {
    const [given, inForce] = [field.value, String(field.inForce ?? "")];
    field.value = inForce;
    if (given.trim() === inForce) return;
    const value = parseNumber(given, toggle);
    if (value === undefined) complain(`“${given}” is not a ${toggle.kind === "int" ? "whole " : ""}number`);
    else ask(value);
  };
  field.addEventListener("change", commit);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") commit();
    if (event.key === "Escape") field.value = field.inForce ?? "";
  });
  return field;
}

function row(toggle, ask, complain) {
  const id = freshId(toggle.name);
  const input = control(toggle, id, ask, complain);
  const line = h("p", { class: "line", id: `${id}-line` });
  const tip = h("div", { class: "s-tip", role: "tooltip", id: `${id}-tip` });
  const label = h("label", { for: id }, toggle.name);
  const traits = [toggle.lossless ? "" : "lossy", toggle.cost === "rebuild" ? "rebuild" : ""].filter(Boolean);
  const tag = h("span", { class: "traits" }, traits.join(", "));
  const node = h("div", { class: "row s-tipped" }, h("div", { class: "head" }, label, tag, input), line, tip);
  return { node, input, line, tip };
}

function show({ node, input, line, tip }, toggle, status, usable) {
  input.inForce = toggle.value;
  if (toggle.kind === "bool") input.checked = toggle.value === true;
  else if (input !== document.activeElement || status.answered) input.value = toggle.value ?? "";
  const { text, tone } = lineOf(toggle, status);
  input.disabled = !usable;
  input.setAttribute("aria-busy", tone === "busy");
  node.setAttribute("data-tone", tone);
  node.setAttribute("data-answer", status.answer?.number ?? 0);
  setText(line, text);
  const paragraphs = explanation(toggle);
  if (tip.shown !== paragraphs.join()) tip.replaceChildren(...paragraphs.map((p) => h("p", {}, p)));
  tip.shown = paragraphs.join();
}

function render({ model, el }) {
  el.classList.add("strata", "strata-toggle-panel");
  const rows = new Map();
  const counts = new Map(); // topic -> how many of its toggles are not as they were delivered
  const asked = new Map(); // asked here, not yet seen by the kernel
  const local = new Map(); // what this page could refuse by itself
  const seen = new Map(); // number of the last answer shown, per toggle
  const groups = h("div", { class: "groups" });
  const spoken = h("p", { class: "s-unseen", role: "status", "aria-live": "polite" });
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", "Engine settings");
  el.append(groups, spoken);

  function rowOf(toggle) {
    const ask = (value) => {
      local.delete(toggle.name);
      asked.set(toggle.name, value);
      model.send({ kind: "set", name: toggle.name, value });
      paint.mark();
    };
    const complain = (text) => {
      local.set(toggle.name, text);
      setText(spoken, `${toggle.name}: ${text}`);
      paint.mark();
    };
    return row(toggle, ask, complain);
  }

  /** The first topic is what people come for; the others are folded, and say whether something in them was changed. */
  function build(toggles) {
    rows.clear();
    counts.clear();
    const topics = [...new Set(toggles.map((toggle) => toggle.topic))];
    const made = topics.map((topic, i) => {
      const members = toggles.filter((toggle) => toggle.topic === topic);
      for (const toggle of members) rows.set(toggle.name, rowOf(toggle));
      const nodes = members.map((toggle) => rows.get(toggle.name).node);
      if (i === 0) return h("section", {}, h("h3", { class: "s-heading" }, topic), ...nodes);
      counts.set(topic, h("span", { class: "count" }));
      return h("details", {}, h("summary", { ...quiet, class: "s-heading" }, topic, " ", counts.get(topic)), ...nodes);
    });
    groups.replaceChildren(...made);
  }

  const paint = painter(() => {
    const toggles = model.get("toggles");
    const [answers, busy, enabled] = ["answers", "busy", "enabled"].map((key) => model.get(key));
    if (toggles.length !== rows.size || toggles.some((toggle) => !rows.has(toggle.name))) build(toggles);
    const latest = Math.max(0, ...Object.values(answers).map((answer) => answer.number));
    for (const toggle of toggles) {
      const answer = answers[toggle.name];
      const answered = answer !== undefined && seen.get(toggle.name) !== answer.number;
      if (answered && seen.size && answer.number === latest) setText(spoken, `${toggle.name}: ${answer.text}`);
      if (answered || toggle.name in busy) asked.delete(toggle.name);
      const status = { asked: asked.get(toggle.name), busy: busy[toggle.name], answer, latest, answered };
      show(rows.get(toggle.name), toggle, { ...status, local: local.get(toggle.name) }, enabled);
      seen.set(toggle.name, answer?.number);
    }
    for (const [topic, node] of counts) setText(node, changesOf(toggles.filter((toggle) => toggle.topic === topic)));
  });

  const wired = wire(model);
  for (const key of ["toggles", "busy", "answers", "enabled"]) wired.on(`change:${key}`, paint.mark);
  paint.mark();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
