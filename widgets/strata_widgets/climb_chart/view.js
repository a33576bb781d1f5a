/** The climb as columns that are elements: figures stand above them, labels below, the spread as a whisker. */
import { h, painter, quiet, rate, roving, setText, tipOf, tipped, wire } from "../_shared.js";

/** ×1.67; empty for what cannot be told. */
export function times(ratio) {
  return ratio == null || !Number.isFinite(ratio) ? "" : `×${ratio.toFixed(2)}`;
}

/** A stage in words, for a screen reader. */
export function stageText({ label, low, median, high, before, baseline, kept }, unit) {
  const parts = [`${label}: ${rate(median)} ${unit}`, `from ${rate(low)} to ${rate(high)}`];
  if (before != null) parts.push(`${times(before)} the stage before`);
  if (baseline != null) parts.push(`${times(baseline)} the first`);
  return parts.join(", ") + (kept ? "" : "; taken back");
}

function column({ label, value, note, share, low, high, kind, spoken, tip }) {
  const bar = h("div", { class: "bar" });
  bar.style.height = `${share * 100}%`;
  const stack = h("div", { class: "stack" }, bar);
  if (high > low) {
    const whisker = h("div", { class: "whisker" });
    whisker.style.bottom = `${low * 100}%`;
    whisker.style.height = `${(high - low) * 100}%`;
    stack.append(whisker);
  }
  const number = h("div", { class: "number" }, value, h("span", { class: "ratio" }, note));
  number.style.bottom = `${Math.max(share, high) * 100}%`;
  stack.append(number);
  return h("li", { class: `column s-tipped ${kind}`, ...tipped, "aria-label": spoken }, stack, h("div", { class: "label" }, label), tipOf(tip));
}

/** Columns of measured stages. */
export function measured(stages, unit) {
  const top = Math.max(...stages.map(({ high }) => high));
  return stages.map((stage) =>
    column({
      label: stage.label,
      value: rate(stage.median),
      note: times(stage.baseline),
      share: stage.median / top,
      low: stage.low / top,
      high: stage.high / top,
      kind: stage.kept ? "kept" : "lost",
      spoken: stageText(stage, unit),
      tip: `${stageText(stage, unit)}. ${stage.tip}`,
    }),
  );
}

/** Columns of what the articles claim; never on the scale of the measured ones. */
export function claimed(claims, note) {
  const top = Math.max(...claims.map(({ value }) => value));
  return claims.map(({ label, detail, value }) => {
    const ratio = times(value / claims[0].value);
    const words = `${detail}: ${value} tok/s, ${ratio} the first. ${note}`;
    return column({ label, value: String(value), note: ratio, share: value / top, low: 0, high: 0, kind: "claim", spoken: words, tip: words });
  });
}

function render({ model, el }) {
  el.classList.add("strata", "strata-climb-chart");
  const unit = h("span", { class: "unit" });
  const source = h("span");
  const ours = h("ol", { class: "columns", "aria-label": "Stages measured here" });
  const empty = h("p", { class: "s-empty" }, "Nothing is measured yet. Press Generate, let it run for three seconds, then flip a switch: each setting becomes a column.");
  const theirs = h("ol", { class: "columns", "aria-label": "Stages claimed by the articles" });
  const claimsNote = h("p", { class: "s-note" });
  const restart = h("button", { ...quiet, type: "button", class: "restart" }, "Start over");
  restart.addEventListener("click", () => model.send({ kind: "restart" }));
  const left = h("section", { class: "ours" }, h("h3", { class: "s-heading" }, "The climb, measured here ", unit), empty, ours, h("p", { class: "s-note" }, source, " ", restart));
  const right = h("section", { class: "theirs" }, h("h3", { class: "s-heading" }, "The articles' claim"), theirs, claimsNote);
  el.append(left, right);
  const stops = [ours, theirs].map(roving);
  let shown = "";

  const paint = painter(() => {
    const [stages, claims, note] = ["stages", "claims", "claims_note"].map((key) => model.get(key));
    setText(unit, model.get("unit"));
    setText(source, model.get("source"));
    setText(claimsNote, note);
    empty.hidden = stages.length > 0;
    ours.hidden = stages.length === 0;
    restart.hidden = !model.get("can_restart") || stages.length === 0;
    right.hidden = claims.length === 0;
    const given = JSON.stringify([stages, claims]);
    if (given === shown) return;
    shown = given;
    stops[0].replace(...measured(stages, model.get("unit")));
    stops[1].replace(...claimed(claims, note));
  }, el);
  const wired = wire(model);
  for (const key of ["stages", "unit", "source", "claims", "claims_note", "can_restart"]) wired.on(`change:${key}`, paint.mark);
  paint.mark();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
