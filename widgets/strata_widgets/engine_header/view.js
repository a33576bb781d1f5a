/** One line about the engine: what it is, what it is doing, and how far long work has come. */
import { h, painter, roving, setText, tipOf, tipped, wire } from "../_shared.js";

const WORDS = {
  loading: "Loading",
  ready: "Ready",
  generating: "Generating",
  rebuilding: "Rebuilding",
  failed: "Failed",
  closed: "Closed",
};

/** "Rebuilding: packing weights, 40 %"; a task that begins with the state's own word is not told twice. */
export function stateText(state, task, fraction) {
  const word = WORDS[state] ?? state;
  if (!task) return word;
  const percent = fraction >= 0 ? `, ${Math.round(fraction * 100)}\u00a0%` : "";
  const twice = task.toLowerCase().startsWith(word.toLowerCase());
  return `${twice ? word + task.slice(word.length) : `${word}: ${task}`}${percent}`;
}

function fact({ label, value, tip }) {
  const words = [h("span", { class: "label" }, label), " ", h("span", { class: "value" }, value)];
  return h("span", { class: "fact s-tipped", ...tipped }, ...words, tipOf(tip));
}

function render({ model, el }) {
  el.classList.add("strata", "strata-engine-header");
  const name = h("h2", { class: "name" });
  const state = h("span", { class: "state" });
  const badge = h("span", { class: "badge" });
  const facts = h("div", { class: "facts" });
  const bar = h("progress", { max: 1, "aria-label": "Progress" });
  const problem = h("p", { class: "problem" });
  const notes = h("ul");
  const folded = h("details", {}, h("summary", {}, "Notes"), notes);
  el.append(h("div", { class: "line" }, name, badge, state, facts), bar, problem, folded);

  const stops = roving(facts);
  let shownFacts = "";
  const paint = painter(() => {
    const [status, task, fraction] = ["state", "task", "fraction"].map((key) => model.get(key));
    setText(name, model.get("model"));
    setText(state, stateText(status, task, fraction));
    state.setAttribute("data-state", status);
    const working = Boolean(task) || status === "loading";
    bar.classList.toggle("idle", !working);
    if (fraction >= 0) bar.setAttribute("value", fraction);
    else bar.removeAttribute("value");
    setText(badge, model.get("badge"));
    badge.hidden = !model.get("badge");
    setText(problem, model.get("problem"));
    problem.hidden = !model.get("problem");
    const given = JSON.stringify(model.get("facts"));
    if (given !== shownFacts) stops.replace(...model.get("facts").map(fact));
    shownFacts = given;
    folded.hidden = model.get("notes").length === 0;
    notes.replaceChildren(...model.get("notes").map((text) => h("li", {}, text)));
  });

  const wired = wire(model);
  for (const key of ["model", "facts", "state", "task", "fraction", "badge", "problem", "notes"]) {
    wired.on(`change:${key}`, paint.mark);
  }
  paint.mark();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
