/** One tile per sensor; a tone is told by a word and not by colour alone. */
import { h, painter, roving, setText, tipOf, tipped, wire } from "../_shared.js";

const TONES = { warn: " (watch)", bad: " (too high)" };

function tile({ label, value, unit, tone, tip }) {
  const number = h("span", { class: "value" }, value);
  const words = [h("div", { class: "label" }, label), h("div", { class: "number" }, number, unit ? ` ${unit}` : "", TONES[tone] ?? "")];
  return h("li", { class: `reading s-tipped ${tone}`, ...tipped }, ...words, tipOf(tip));
}

function render({ model, el }) {
  el.classList.add("strata", "strata-hardware-strip");
  const list = h("ul", { "aria-label": "Sensors" });
  const note = h("p", { class: "s-note" });
  el.append(h("h3", { class: "s-heading" }, "Hardware"), list, note);
  const stops = roving(list);
  let shown = "";
  const paint = painter(() => {
    const given = JSON.stringify(model.get("readings"));
    if (given !== shown) stops.replace(...model.get("readings").map(tile));
    shown = given;
    setText(note, model.get("note"));
    note.hidden = !model.get("note");
  }, el);
  const wired = wire(model);
  for (const key of ["readings", "note"]) wired.on(`change:${key}`, paint.mark);
  paint.mark();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
