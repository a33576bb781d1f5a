/** One stacked bar per step on a canvas, and beside it the mean of each cause as a list that can be read aloud. */
import { h, painter, quiet, roving, setText, tipOf, tipped, wire } from "../_shared.js";
import { cursor, keepDrawing, prepare, scale, stroke, widthOf } from "../_canvas.js";
import { ceilingOf, decodeSteps, joinSteps, means, millis } from "./steps.js";

const HEIGHT = 190;
const PAD = { left: 38, right: 2, top: 20, bottom: 20 };
const WHOLE_TIP = "Mean of StepEvent.duration_ms over the steps that the line under the bars names.";
const BAR = 7; // pixels from bar to bar at least

/** A step in words. */
export function stepText(step, causes) {
  const tokens = [step.prefill && `${step.prefill} prompt tokens`, step.decode && `${step.decode} decoded`].filter(Boolean).join(" + ");
  const parts = causes.map(({ label }, i) => [step.parts[i], `${label} ${millis(step.parts[i])}`]).filter(([ms]) => ms > 0.0005);
  return `step ${step.step}: ${millis(step.whole)}, ${tokens || "no tokens"}; ${parts.map(([, text]) => text).join(", ")}`;
}

function drawSteps(canvas, { steps, causes, chosen }) {
  const page = prepare(canvas, HEIGHT);
  if (!page) return;
  const { g, width, ink, color } = page;
  const { top, ticks } = scale(ceilingOf(steps) * 1.02);
  const plotH = HEIGHT - PAD.top - PAD.bottom;
  const y = (ms) => PAD.top + (1 - Math.min(ms, top) / top) * plotH;
  for (const ms of ticks) {
    g.strokeStyle = ink;
    g.globalAlpha = ms ? 0.1 : 0.45;
    stroke(g, [[PAD.left, Math.round(y(ms)) + 0.5], [width - PAD.right, Math.round(y(ms)) + 0.5]]);
    g.globalAlpha = 1;
    g.fillStyle = color("--s-muted");
    g.textAlign = "right";
    g.fillText(Number(ms.toPrecision(3)), PAD.left - 7, y(ms));
  }
  g.textAlign = "left";
  g.fillStyle = color("--s-muted");
  g.fillText("ms", PAD.left - 23, PAD.top - 12);
  if (steps.length) {
    g.fillText(`step ${steps[0].step}`, PAD.left, HEIGHT - 8);
    g.textAlign = "right";
    g.fillText(`step ${steps.at(-1).step}`, width - PAD.right, HEIGHT - 8);
  }
  steps.forEach((step, i) => {
    const left = PAD.left + i * BAR + 1;
    let from = 0;
    g.globalAlpha = chosen < 0 || chosen === i ? 1 : 0.45;
    step.parts.forEach((ms, cause) => {
      const [low, high] = [y(from), y(from + ms)];
      g.fillStyle = color(`--s-c-${causes[cause].key}`);
      if (low - high > 0.2) g.fillRect(left, high, BAR - 2, low - high);
      from += ms;
    });
    g.globalAlpha = 1;
    if (step.whole > top) {
      g.fillStyle = ink;
      g.textAlign = "center";
      g.fillText("▴", left + BAR / 2 - 1, PAD.top - 5);
    }
  });
}

function causeRow({ key, label, tip }) {
  const swatch = h("span", { class: "s-swatch", "aria-hidden": true });
  swatch.style.setProperty("background", `var(--s-c-${key})`);
  const ms = h("span", { class: "ms" });
  const share = h("span", { class: "share" });
  const bubble = tipOf(`${tip} The percentage is of the mean step.`);
  const node = h("li", { class: "cause s-tipped", ...tipped }, swatch, h("span", { class: "label" }, label), ms, share, bubble);
  return { node, ms, share };
}

function render({ model, el }) {
  el.classList.add("strata", "strata-step-timeline");
  const title = h("h3", { class: "s-heading" }, "Where each step goes");
  const canvas = h("canvas", { ...quiet, role: "slider", tabindex: 0, "aria-label": "Steps, milliseconds by cause" });
  const line = h("p", { class: "s-readout", "aria-live": "off" });
  const list = h("ul", { class: "causes", "aria-label": "Mean milliseconds by cause" });
  const total = h("span", {});
  const whole = h("p", { ...quiet, class: "whole s-tipped", tabindex: 0 }, total, tipOf(WHOLE_TIP));
  const side = h("div", { class: "side" }, whole, list);
  const note = h("p", { class: "s-note" });
  el.append(title, h("div", { class: "both" }, h("figure", {}, canvas, h("figcaption", {}, line)), side), note);
  let steps = [];
  let rows = [];
  const stops = roving(list);
  const shown = () => steps.slice(-Math.max(1, Math.floor((widthOf(canvas) - PAD.left - PAD.right) / BAR)));
  const index = cursor(canvas, {
    at: (x) => (x < PAD.left ? -1 : Math.floor((x - PAD.left) / BAR)),
    count: () => shown().length,
    mark: () => paint.soon(),
  });

  const paint = painter(() => {
    const causes = model.get("causes");
    const visible = shown();
    const chosen = index();
    drawSteps(canvas, { steps: visible, causes, chosen });
    const mean = means(visible);
    setText(total, mean ? `${millis(mean.whole)} a step` : "No step yet");
    rows.forEach((row, i) => {
      setText(row.ms, mean ? millis(mean.parts[i]) : "–");
      setText(row.share, mean ? `${Math.round((100 * mean.parts[i]) / mean.whole)} %` : "");
      row.node.classList.toggle("none", !mean || mean.parts[i] < 0.0005);
    });
    const idle = mean ? `Means over the last ${mean.count} ${mean.only}. Move over the bars, or focus them and press ← →.` : "Press Generate: each step of the engine becomes a bar here.";
    const text = chosen >= 0 ? stepText(visible[chosen], causes) : idle;
    setText(line, text);
    canvas.setAttribute("aria-valuemin", 0);
    canvas.setAttribute("aria-valuemax", Math.max(0, visible.length - 1));
    canvas.setAttribute("aria-valuenow", Math.max(0, chosen));
    canvas.setAttribute("aria-valuetext", text);
    setText(note, model.get("note"));
    note.hidden = !model.get("note");
  }, el);
  function reload() {
    const history = model.get("history");
    if (history.byteLength) steps = joinSteps(steps, decodeSteps(history, model.get("causes").length));
    paint.mark();
  }
  function relabel() {
    rows = model.get("causes").map(causeRow);
    stops.replace(...rows.map(({ node }) => node));
    paint.mark();
  }
  const wired = wire(model);
  wired.on("change:history", reload);
  wired.on("change:causes", relabel);
  wired.on("change:note", paint.mark);
  wired.on("msg:custom", (_content, buffers) => {
    for (const buffer of buffers ?? []) steps = joinSteps(steps, decodeSteps(buffer, model.get("causes").length));
    paint.mark();
  });
  relabel();
  reload();
  return keepDrawing(canvas, wired, paint);
}

export default { render };
