/** A bar from nothing to the roofline, the share in large figures, and what it was computed from. */
import { h, painter, quiet, rate, roving, setText, tipOf, tipped, wire } from "../_shared.js";

/** 62 %; a dash for what is not known; words for what cannot be. */
export function shareText(share) {
  if (share == null || !Number.isFinite(share)) return "–";
  return `${Math.round(share * 100)} %`;
}

function number({ label, unit, tip }) {
  const value = h("span", { class: "value" });
  const words = [h("span", { class: "label" }, label), value, h("span", { class: "unit" }, unit ? ` ${unit}` : "")];
  const node = h("li", { class: "s-tipped", ...tipped }, ...words, tipOf(tip));
  return { node, value };
}

function render({ model, el }) {
  el.classList.add("strata", "strata-roofline-gauge");
  const big = h("span", { class: "share" });
  const tip = tipOf();
  const fill = h("div", { class: "fill" });
  const bar = h("div", { class: "bar", role: "meter", "aria-label": "Share of the memory roofline", "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  const list = h("ul", {});
  const note = h("p", { class: "s-note" });
  const button = h("button", { ...quiet, type: "button", class: "s-button" }, "Measure the bandwidth");
  button.addEventListener("click", () => model.send({ kind: "measure" }));
  const head = h("div", { ...quiet, class: "head s-tipped", tabindex: 0 }, big, h("span", { class: "of" }, " of the memory roofline"), tip);
  const scaleLine = h("div", { class: "scale", "aria-hidden": true }, h("span", {}, "0"), h("span", {}, "50 %"), h("span", {}, "roofline"));
  el.append(h("h3", { class: "s-heading" }, "How near to the limit"), head, bar, scaleLine, list, note, button);
  const stops = roving(list);
  let rows = [];

  const paint = painter(() => {
    const share = model.get("share");
    const known = share != null && Number.isFinite(share);
    setText(big, shareText(share));
    setText(tip, model.get("share_tip"));
    fill.style.width = `${known ? Math.min(100, share * 100) : 0}%`;
    el.classList.toggle("wrong", known && share > 1);
    bar.setAttribute("aria-valuenow", known ? Math.round(share * 100) : 0);
    bar.setAttribute("aria-valuetext", known ? shareText(share) : "not known");
    model.get("values").forEach((value, i) => {
      if (rows[i]) setText(rows[i].value, typeof value === "string" ? value : rate(value));
    });
    setText(note, model.get("note"));
    note.hidden = !model.get("note");
    button.hidden = !model.get("can_measure") && !model.get("busy");
    button.disabled = model.get("busy");
    setText(button, model.get("busy") ? "Measuring …" : "Measure the bandwidth");
  }, el);
  function relabel() {
    rows = model.get("numbers").map(number);
    stops.replace(...rows.map(({ node }) => node));
    paint.mark();
  }
  const wired = wire(model);
  wired.on("change:numbers", relabel);
  for (const key of ["share", "share_tip", "values", "can_measure", "busy", "note"]) wired.on(`change:${key}`, paint.mark);
  relabel();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
