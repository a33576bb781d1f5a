/** Buttons that send load, and what became of the last press in words. */
import { h, painter, quiet, setText, wire } from "../_shared.js";

function render({ model, el }) {
  el.classList.add("strata", "strata-load-panel");
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", "Load");
  const row = h("span", { class: "row" });
  const stop = h("button", { ...quiet, type: "button", class: "s-button" }, "Stop all");
  const answer = h("span", { class: "answer", role: "status", "aria-live": "polite" });
  stop.addEventListener("click", () => model.send({ kind: "stop" }));
  el.append(h("span", { class: "s-heading", "aria-hidden": true }, "Load"), row, stop, answer);
  let buttons = [];

  function build() {
    buttons = model.get("loads").map(({ name, label, tip }) => {
      const node = h("button", { ...quiet, type: "button", class: "s-button" }, label);
      node.addEventListener("click", () => model.send({ kind: "load", name }));
      return { node, holder: h("span", { class: "s-tipped" }, node, h("span", { class: "s-tip", role: "tooltip" }, tip)) };
    });
    row.replaceChildren(...buttons.map(({ holder }) => holder));
    paint.mark();
  }
  const paint = painter(() => {
    const [enabled, count, given] = ["enabled", "num_unfinished", "answer"].map((key) => model.get(key));
    for (const { node } of buttons) node.disabled = !enabled;
    stop.disabled = !enabled || count === 0;
    setText(answer, given.text ?? "");
    answer.classList.toggle("bad", given.ok === false);
  });
  const wired = wire(model);
  wired.on("change:loads", build);
  for (const key of ["enabled", "num_unfinished", "answer"]) wired.on(`change:${key}`, paint.mark);
  build();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
