/** Speed of the last minute on a canvas: total solid, per stream dashed, a marker at every change of a setting. */
import { h, painter, quiet, rate, roving, setText, tipOf, tipped, wire } from "../_shared.js";
import { keepDrawing, prepare, scale, stroke, widthOf } from "../_canvas.js";
import { BEFORE_S, SETTLE_S, SPAN_S, decode, effect, join, nearest, pieces, placeLabels, timeAxis } from "./series.js";

const HEIGHT = 206;
const PAD = { left: 40, right: 8, top: 44, bottom: 22 };
const EFFECT_TIP = `A change is judged by the mean speed per stream of the ${BEFORE_S} s before it and of the ${BEFORE_S} s that begin ${SETTLE_S} s after it, with as many streams and no other change (StepEvent, SettingEvent).`;
const LINES = [
  { key: "stream", color: "--s-stream", dash: [6, 4] },
  { key: "total", color: "--s-total", dash: [] },
];

/** A sample in words, with the changes of setting near it. */
export function readout(sample, end, markers) {
  const ago = end - sample.t < 0.05 ? "latest" : `${(end - sample.t).toFixed(1)} s before the latest`;
  const streams = `${sample.running} stream${sample.running === 1 ? "" : "s"}`;
  const near = markers.filter((marker) => Math.abs(marker.t - sample.t) < 0.5).map((marker) => marker.label);
  const speeds = `total ${rate(sample.total)}, per stream ${rate(sample.stream)} tok/s, ${streams}`;
  return [`${ago}: ${speeds}`, ...near].join("; ");
}

/** The chart in a sentence or two. */
export function summary(samples, markers) {
  if (!samples.length) return "No tokens in the last minute.";
  const last = samples.at(-1);
  const top = Math.max(...samples.map((sample) => sample.total));
  const changes = markers.length ? ` Changes: ${markers.map((marker) => marker.label).join(", ")}.` : "";
  return `Latest total ${rate(last.total)} tok/s, per stream ${rate(last.stream)} tok/s; highest total of the last minute ${rate(top)} tok/s.${changes}`;
}

/** What the latest change that can be judged did, in words; empty when there is none. */
export function verdict(samples, markers) {
  for (const marker of markers.toReversed()) {
    const found = effect(samples, marker, markers);
    if (found) {
      const { before, after, streams } = found;
      const many = `${streams} stream${streams === 1 ? "" : "s"}`;
      return `${marker.label}: ${rate(before)} → ${rate(after)} tok/s per stream with ${many} (×${(after / before).toFixed(2)})`;
    }
  }
  return "";
}

function tile({ label, unit, line, tip }) {
  const swatch = line ? [h("span", { class: `swatch ${line}`, "aria-hidden": true })] : [];
  const value = h("span", { class: "value" });
  const parts = [h("div", { class: "label" }, ...swatch, label), h("div", { class: "number" }, value, unit && ` ${unit}`), tipOf(tip)];
  return { node: h("div", { class: `tile s-tipped ${line}`, ...tipped }, ...parts), value };
}

function drawChart(canvas, { samples, markers, cursor, end, span }) {
  const page = prepare(canvas, HEIGHT);
  if (!page) return;
  const { g, width, ink, color } = page;
  const { top, ticks } = scale(Math.max(10, ...samples.map((sample) => Math.max(sample.total, sample.stream || 0))) * 1.05);
  const [plotW, plotH] = [width - PAD.left - PAD.right, HEIGHT - PAD.top - PAD.bottom];
  const x = (t) => PAD.left + (1 - (end - t) / span) * plotW;
  const y = (value) => PAD.top + (1 - value / top) * plotH;

  for (const value of ticks) {
    g.strokeStyle = ink;
    g.globalAlpha = value ? 0.1 : 0.45;
    stroke(g, [[PAD.left, Math.round(y(value)) + 0.5], [width - PAD.right, Math.round(y(value)) + 0.5]]);
    g.globalAlpha = 1;
    g.fillStyle = color("--s-muted");
    g.textAlign = "right";
    g.fillText(Number(value.toPrecision(3)), PAD.left - 7, y(value));
  }
  g.textAlign = "left";
  g.fillText("tok/s", 0, PAD.top - 15);
  for (const ago of [1, 0.75, 0.5, 0.25, 0].map((share) => share * span)) {
    g.textAlign = ago === span ? "left" : ago === 0 ? "right" : "center";
    g.fillText(ago ? `−${ago} s` : "latest", x(end - ago), HEIGHT - 9);
  }
  drawMarkers(g, markers.filter((marker) => marker.t >= end - span), { x, width, color, bottom: y(0) });
  g.lineJoin = "round";
  for (const { key, color: name, dash } of LINES) {
    g.strokeStyle = color(name);
    g.lineWidth = 2;
    g.setLineDash(dash);
    for (const piece of pieces(samples, key)) stroke(g, piece.map((sample) => [x(sample.t), y(sample[key])]));
    g.setLineDash([]);
  }
  if (!cursor) return;
  g.lineWidth = 1;
  g.strokeStyle = color("--s-muted");
  stroke(g, [[x(cursor.t), PAD.top], [x(cursor.t), y(0)]]);
  for (const { key, color: name } of LINES.filter(({ key }) => Number.isFinite(cursor[key]))) {
    g.fillStyle = color(name);
    g.beginPath();
    g.arc(x(cursor.t), y(cursor[key]), 4, 0, 2 * Math.PI);
    g.fill();
  }
}

function drawMarkers(g, markers, { x, width, color, bottom }) {
  g.textAlign = "left";
  g.lineWidth = 1;
  const labels = markers.map(({ t, label }) => ({ x: x(t) - 3, w: g.measureText(label).width + 8, label }));
  placeLabels(labels, width).forEach(({ row, left }, i) => {
    const line = Math.round(x(markers[i].t)) + 0.5;
    const labelY = 10 + row * 17;
    g.strokeStyle = color("--s-edge");
    stroke(g, [[line, row < 0 ? PAD.top - 6 : labelY + 8], [line, bottom]]);
    g.fillStyle = color("--s-ink");
    if (row >= 0) g.fillText(labels[i].label, left + 3, labelY);
  });
}

function render({ model, el }) {
  el.classList.add("strata", "strata-rate-chart");
  const numbers = h("div", { class: "numbers" });
  const spoken = { role: "slider", "aria-label": "Output speed of the last minute", "aria-orientation": "horizontal" };
  const canvas = h("canvas", { ...quiet, ...spoken, tabindex: 0, "aria-valuemin": -SPAN_S, "aria-valuemax": 0 });
  const line = h("span", {});
  const readoutLine = h("p", { ...quiet, class: "s-readout s-tipped", tabindex: 0, "aria-live": "off" }, line, tipOf(EFFECT_TIP));
  el.append(numbers, h("figure", {}, canvas, h("figcaption", {}, readoutLine)));
  let samples = [];
  let cursorT = null; // time under the pointer or chosen by the keyboard
  let tiles = [];
  const stops = roving(numbers);

  const paint = painter(() => {
    const markers = model.get("markers");
    model.get("values").forEach((value, i) => {
      if (tiles[i]) setText(tiles[i].value, typeof value === "string" ? value : rate(value));
    });
    const cursor = cursorT === null ? null : samples[nearest(samples, cursorT)];
    const { end, span } = timeAxis(samples, markers);
    drawChart(canvas, { samples, markers, cursor, end, span });
    const text = summary(samples, markers);
    canvas.setAttribute("aria-valuenow", cursor ? (cursor.t - end).toFixed(1) : 0);
    canvas.setAttribute("aria-valuetext", cursor ? readout(cursor, end, markers) : text);
    setText(line, cursor ? readout(cursor, end, markers) : verdict(samples, markers) || "Mean over the last second. Move over the chart, or focus it and press ← →.");
  }, el);

  canvas.addEventListener("pointermove", (event) => {
    const { end, span } = timeAxis(samples, model.get("markers"));
    const plotW = widthOf(canvas) - PAD.left - PAD.right;
    cursorT = end - (1 - (event.offsetX - PAD.left) / plotW) * span;
    paint.soon();
  });
  const leave = () => {
    cursorT = null;
    paint.soon();
  };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const at = cursorT === null ? samples.length - 1 : nearest(samples, cursorT);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - 50, PageUp: at + 50, Home: 0, End: samples.length - 1 };
    if (event.key === "Escape") leave();
    if (!(event.key in moves) || !samples.length) return;
    event.preventDefault();
    cursorT = samples[Math.min(samples.length - 1, Math.max(0, moves[event.key]))].t;
    paint.soon();
  });

  function reload() {
    const history = model.get("history");
    const whole = decode(history.byteLength === undefined ? new Uint8Array() : history);
    samples = join(whole, samples);
    paint.mark();
  }
  function retile() {
    tiles = model.get("numbers").map(tile);
    stops.replace(...tiles.map(({ node }) => node));
    paint.mark();
  }
  const wired = wire(model);
  wired.on("change:history", reload);
  wired.on("change:numbers", retile);
  for (const key of ["values", "markers"]) wired.on(`change:${key}`, paint.mark);
  wired.on("msg:custom", (content, buffers) => {
    for (const buffer of buffers ?? []) samples = join(samples, decode(buffer));
    paint.mark();
  });
  retile();
  reload();
  return keepDrawing(canvas, wired, paint);
}

export default { render };
