/** Proposals as chips: taken ones full, refused ones struck through; and how often each place was taken. */
import { facts, h, painter, roving, setText, tipOf, tipped, wire } from "../_shared.js";

/** Spaces and line ends that would not be seen. */
export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
}

/** A round in words. */
export function roundText({ accepted, rejected }) {
  const all = accepted.length + rejected.length;
  const stop = rejected.length ? `; “${rejected[0]}” was not what the model says` : "";
  return `${accepted.length} of ${all} proposed tokens taken${stop}`;
}

function chips({ accepted, rejected }) {
  const made = [...accepted.map((text) => ["yes", text]), ...rejected.map((text) => ["no", text])];
  const nodes = made.map(([kind, text]) => h("span", { class: `chip ${kind}` }, visible(text)));
  return h("span", { class: "round", role: "img", "aria-label": roundText({ accepted, rejected }) }, ...nodes);
}

function laneRow({ title, color, rounds }) {
  const swatch = h("span", { class: "s-swatch", "aria-hidden": true });
  swatch.style.setProperty("background", `var(--s-r${color})`);
  return h("li", { class: "lane" }, swatch, h("span", { class: "title" }, title), h("span", { class: "rounds" }, ...rounds.map(chips)));
}

function place({ position, drafted, accepted }) {
  const share = drafted ? accepted / drafted : 0;
  const fill = h("span", { class: "fill" });
  fill.style.width = `${share * 100}%`;
  const tip = `Place ${position} of a proposal: ${accepted} taken of ${drafted} proposed. Formula: taken / proposed, from the drafts of StepEvent.`;
  const words = [h("span", { class: "label" }, `place ${position}`), h("span", { class: "bar", "aria-hidden": true }, fill), h("span", { class: "percent" }, `${Math.round(share * 100)} %`)];
  return h("li", { class: "place s-tipped", ...tipped }, ...words, tipOf(tip));
}

function render({ model, el }) {
  el.classList.add("strata", "strata-draft-lanes");
  const numbers = facts("Speculation");
  const lanes = h("ul", { class: "lanes", "aria-label": "Latest proposals" });
  const places = h("ul", { class: "places", "aria-label": "Acceptance by place" });
  const note = h("p", { class: "s-empty" });
  el.append(h("h3", { class: "s-heading" }, "Speculation"), numbers.node, note, h("div", { class: "both" }, lanes, places));
  const shown = { lanes: "", by_position: "" };
  const stops = roving(places);

  const paint = painter(() => {
    numbers.show(model.get("numbers"));
    setText(note, model.get("note"));
    note.hidden = !model.get("note");
    const fill = { lanes: (rows) => lanes.replaceChildren(...rows.map(laneRow)), by_position: (rows) => stops.replace(...rows.map(place)) };
    for (const key of ["lanes", "by_position"]) {
      const given = JSON.stringify(model.get(key));
      if (given !== shown[key]) fill[key](model.get(key));
      shown[key] = given;
    }
  }, el);
  const wired = wire(model);
  for (const key of ["lanes", "by_position", "numbers", "note"]) wired.on(`change:${key}`, paint.mark);
  paint.mark();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
