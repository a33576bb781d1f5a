/** A scatter of speed and loss on a canvas; points that nothing beats are full and joined by a line. */
import { h, painter, quiet, setText, wire } from "../_shared.js";
import { cursor, keepDrawing, prepare, scale, stroke, widthOf } from "../_canvas.js";

const HEIGHT = 210;
const PAD = { left: 52, right: 90, top: 26, bottom: 34 };

function place(points, width) {
  const across = scale(Math.max(...points.map(({ x }) => x)) * 1.05);
  const up = scale(Math.max(1e-6, ...points.map(({ y }) => y)) * 1.1);
  const x = (value) => PAD.left + (value / across.top) * (width - PAD.left - PAD.right);
  const y = (value) => PAD.top + (1 - value / up.top) * (HEIGHT - PAD.top - PAD.bottom);
  return { across, up, x, y };
}

/** Index of the point nearest to a place, within reach; -1 for none. */
export function nearestPoint(points, width, px, py, reach = 24) {
  if (!points.length) return -1;
  const { x, y } = place(points, width);
  const distances = points.map((point) => Math.hypot(x(point.x) - px, y(point.y) - py));
  const best = distances.indexOf(Math.min(...distances));
  return distances[best] <= reach ? best : -1;
}

function drawPoints(canvas, { points, chosen, labels }) {
  const page = prepare(canvas, HEIGHT);
  if (!page) return;
  const { g, width, ink, color } = page;
  const { across, up, x, y } = place(points, width);
  g.fillStyle = color("--s-muted");
  for (const value of up.ticks) {
    g.strokeStyle = ink;
    g.globalAlpha = value ? 0.1 : 0.45;
    stroke(g, [[PAD.left, Math.round(y(value)) + 0.5], [width - PAD.right, Math.round(y(value)) + 0.5]]);
    g.globalAlpha = 1;
    g.textAlign = "right";
    g.fillText(Number(value.toPrecision(3)), PAD.left - 7, y(value));
  }
  g.textAlign = "center";
  for (const value of across.ticks) g.fillText(Number(value.toPrecision(3)), x(value), HEIGHT - 24);
  g.textAlign = "left";
  g.fillText(labels[1], 0, 9);
  g.textAlign = "right";
  g.fillText(labels[0], width - PAD.right, HEIGHT - 8);
  g.strokeStyle = color("--s-accent");
  g.lineWidth = 1.5;
  stroke(g, points.filter(({ best }) => best).toSorted((a, b) => a.x - b.x).map((point) => [x(point.x), y(point.y)]));
  points.forEach((point, i) => {
    g.beginPath();
    g.arc(x(point.x), y(point.y), chosen === i ? 7 : 5, 0, 2 * Math.PI);
    g.fillStyle = point.best ? color("--s-accent") : color("--s-paper");
    g.strokeStyle = point.best ? color("--s-accent") : color("--s-edge");
    g.fill();
    g.stroke();
    g.fillStyle = ink;
    g.textAlign = "left";
    g.fillText(point.label, x(point.x) + 10, y(point.y) - 8);
  });
}

function render({ model, el }) {
  el.classList.add("strata", "strata-quality-chart");
  const canvas = h("canvas", { ...quiet, role: "slider", tabindex: 0, "aria-label": "Quality against speed" });
  const line = h("p", { class: "s-readout", "aria-live": "off" });
  const figure = h("figure", {}, canvas, h("figcaption", {}, line));
  const note = h("p", { class: "s-note" });
  el.append(h("h3", { class: "s-heading" }, "Quality against speed"), figure, note);
  const index = cursor(canvas, {
    at: (x, y) => nearestPoint(model.get("points"), widthOf(canvas), x, y),
    count: () => model.get("points").length,
    mark: () => paint.soon(),
  });
  const paint = painter(() => {
    const [points, chosen] = [model.get("points"), index()];
    const labels = [model.get("x_label"), model.get("y_label")];
    figure.hidden = points.length === 0;
    if (points.length) drawPoints(canvas, { points, chosen, labels });
    const text = chosen >= 0 ? `${points[chosen].label}: ${points[chosen].tip}` : "Full points: nothing else is better in both. Focus the chart and press ← →.";
    setText(line, text);
    setText(note, model.get("note"));
    note.hidden = !model.get("note");
    canvas.setAttribute("aria-valuemin", 0);
    canvas.setAttribute("aria-valuemax", Math.max(0, points.length - 1));
    canvas.setAttribute("aria-valuenow", Math.max(0, chosen));
    canvas.setAttribute("aria-valuetext", text);
  }, el);
  const wired = wire(model);
  for (const key of ["points", "x_label", "y_label", "note"]) wired.on(`change:${key}`, paint.mark);
  paint.mark();
  return keepDrawing(canvas, wired, paint);
}

export default { render };
