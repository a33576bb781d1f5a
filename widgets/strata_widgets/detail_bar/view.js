/** One button per panel; pressed means that the panel is open. */
import { h, painter, quiet, setText, wire } from "../_shared.js";

function render({ model, el }) {
  el.classList.add("strata", "strata-detail-bar");
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", "Details");
  const row = h("div", { class: "row" });
  const note = h("span", { class: "note" });
  el.append(h("span", { class: "s-heading", "aria-hidden": true }, "Details"), row, note);
  let buttons = [];

  function build() {
    buttons = model.get("panels").map(({ name, title, tip }) => {
      const node = h("button", { ...quiet, type: "button", class: "chip" }, title);
      node.addEventListener("click", () => model.send({ kind: "open", name, open: !model.get("shown").includes(name) }));
      const bubble = h("span", { class: "s-tip", role: "tooltip" }, tip);
      return { name, node, holder: h("span", { class: "s-tipped" }, node, bubble) };
    });
    row.replaceChildren(...buttons.map(({ holder }) => holder));
    paint.mark();
  }
  const paint = painter(() => {
    const shown = model.get("shown");
    for (const { name, node } of buttons) node.setAttribute("aria-expanded", shown.includes(name));
    setText(note, model.get("note"));
  });
  const wired = wire(model);
  wired.on("change:panels", build);
  for (const key of ["shown", "note"]) wired.on(`change:${key}`, paint.mark);
  build();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
