/** Layers times experts on a canvas: the more tokens an expert took, the more of the colour. */
import { facts, h, painter, quiet, setText, wire } from "../_shared.js";
import { cursor, keepDrawing, prepare, widthOf } from "../_canvas.js";

const MARGIN = { left: 58, top: 16 };
const [MOST_WIDTH, MOST_HEIGHT, LEAST_HEIGHT] = [34, 16, 4]; // pixels of a cell
const WHOLE_HEIGHT = 320;
const FULL_AT = 3; // times the even share: as dark as it gets

/** Width and height of a cell, and of the whole canvas. */
export function layout(numLayers, numExperts, width) {
  const cellWidth = Math.max(1, Math.min(MOST_WIDTH, (width - MARGIN.left) / Math.max(1, numExperts)));
  const cellHeight = Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, Math.floor(WHOLE_HEIGHT / Math.max(1, numLayers))));
  return { cellWidth, cellHeight, height: MARGIN.top + Math.max(1, numLayers) * cellHeight };
}

/** How dark a cell is, 0 to 1: its share over `FULL_AT` even shares. */
export function depth(count, total, numExperts) {
  return total ? Math.min(1, (count * numExperts) / total / FULL_AT) : 0;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const whole = (number) => Math.round(number).toLocaleString("en").replaceAll(",", "\u202f");

/** What a cell is, in words, with the formula of its share. */
export function cellText(counts, i, numExperts, topK) {
  const layer = Math.floor(i / numExperts);
  const total = counts.slice(layer * numExperts, (layer + 1) * numExperts).reduce((sum, count) => sum + count, 0);
  const share = total ? percent(counts[i] / total) : "–";
  const formula = `${whole(counts[i])} / (${whole(total / topK)} tokens × ${topK} experts a token)`;
  return `layer ${layer}, expert ${i % numExperts}: chosen ${whole(counts[i])} times, share ${share} = ${formula}; an even share is ${percent(1 / numExperts)}`;
}

/** A layer in words: its busiest expert, and how many were never chosen. */
export function layerText(row, layer) {
  const total = row.reduce((sum, count) => sum + count, 0);
  if (!total) return `layer ${layer}: nothing yet`;
  const most = Math.max(...row);
  return `layer ${layer}: most to expert ${row.indexOf(most)}, ${percent(most / total)}; ${row.filter((count) => !count).length} never chosen`;
}

function drawCells(canvas, { counts, numLayers, numExperts, chosen }) {
  const { cellWidth, cellHeight, height } = layout(numLayers, numExperts, widthOf(canvas) || 1);
  const page = prepare(canvas, height);
  if (!page || !counts.length) return;
  const { g, ink, color } = page;
  const gap = cellWidth > 5 && cellHeight > 5 ? 1 : 0.5;
  for (let layer = 0; layer < numLayers; layer += 1) {
    const row = counts.slice(layer * numExperts, (layer + 1) * numExperts);
    const total = row.reduce((sum, count) => sum + count, 0);
    row.forEach((count, expert) => {
      g.globalAlpha = count ? 0.12 + 0.88 * depth(count, total, numExperts) : 0.05;
      g.fillStyle = count ? color("--s-total") : ink;
      g.fillRect(MARGIN.left + expert * cellWidth, MARGIN.top + layer * cellHeight, cellWidth - gap, cellHeight - gap);
    });
  }
  g.globalAlpha = 1;
  g.fillStyle = color("--s-muted");
  const every = Math.ceil(14 / cellHeight);
  for (let layer = 0; layer < numLayers; layer += every) g.fillText(`layer ${layer}`, 0, MARGIN.top + (layer + 0.5) * cellHeight);
  const step = Math.ceil(28 / cellWidth);
  for (let expert = 0; expert < numExperts; expert += step) g.fillText(`${expert}`, MARGIN.left + expert * cellWidth, 7);
  if (chosen < 0) return;
  g.strokeStyle = ink;
  g.lineWidth = 2;
  const [x, y] = [chosen % numExperts, Math.floor(chosen / numExperts)];
  g.strokeRect(MARGIN.left + x * cellWidth - 1, MARGIN.top + y * cellHeight - 1, cellWidth + 1, cellHeight + 1);
}

function render({ model, el }) {
  el.classList.add("strata", "strata-expert-map");
  const restart = h("button", { ...quiet, type: "button", class: "s-button" }, "Count anew");
  restart.addEventListener("click", () => model.send({ kind: "restart" }));
  const numbers = facts("Experts");
  const canvas = h("canvas", { ...quiet, role: "slider", tabindex: 0, "aria-label": "Experts by layer" });
  const line = h("p", { class: "s-readout", "aria-live": "off" });
  const layers = h("ol", { class: "layers", start: 0, tabindex: 0, "aria-label": "Layers in words" });
  const words = h("details", {}, h("summary", { ...quiet }, "In words, layer by layer"), layers);
  const note = h("p", { class: "s-note" });
  const head = h("div", { class: "top" }, h("h3", { class: "s-heading" }, "Experts by layer"), restart);
  const map = h("figure", {}, canvas, h("figcaption", {}, line));
  el.append(head, numbers.node, map, words, note);
  words.addEventListener("toggle", () => paint.soon());
  let counts = [];
  const size = () => [model.get("num_layers"), model.get("num_experts")];
  const index = cursor(canvas, {
    at: (x, y) => {
      const [numLayers, numExperts] = size();
      const { cellWidth, cellHeight } = layout(numLayers, numExperts, widthOf(canvas) || 1);
      const [column, row] = [Math.floor((x - MARGIN.left) / cellWidth), Math.floor((y - MARGIN.top) / cellHeight)];
      return column < 0 || column >= numExperts || row < 0 || row >= numLayers ? -1 : row * numExperts + column;
    },
    count: () => counts.length,
    row: () => model.get("num_experts"),
    mark: () => paint.soon(),
  });

  const paint = painter(() => {
    const [[numLayers, numExperts], topK, chosen] = [size(), model.get("top_k"), index()];
    const rows = Array.from({ length: numLayers }, (_, i) => counts.slice(i * numExperts, (i + 1) * numExperts));
    map.hidden = words.hidden = !counts.length;
    drawCells(canvas, { counts, numLayers, numExperts, chosen });
    numbers.show(model.get("numbers"));
    const idle = "One row is one layer, one column one expert. Move over the map, or focus it and use the arrow keys.";
    const text = chosen >= 0 ? cellText(counts, chosen, numExperts, topK) : idle;
    setText(line, text);
    if (words.open) {
      while (layers.childNodes.length > rows.length) layers.childNodes[rows.length].remove();
      while (layers.childNodes.length < rows.length) layers.append(h("li", {}));
      rows.forEach((row, i) => setText(layers.childNodes[i], layerText(row, i)));
    }
    setText(note, model.get("note"));
    note.hidden = !model.get("note");
    restart.disabled = !model.get("enabled");
    canvas.setAttribute("aria-valuemin", 0);
    canvas.setAttribute("aria-valuemax", Math.max(0, counts.length - 1));
    canvas.setAttribute("aria-valuenow", Math.max(0, chosen));
    const said = model.get("numbers").map(({ label, value }) => `${label} ${value}`).join(", ");
    canvas.setAttribute("aria-valuetext", chosen >= 0 ? text : said || idle);
  }, el);
  function reload() {
    const given = model.get("counts");
    const bytes = given.byteLength ? given.buffer.slice(given.byteOffset, given.byteOffset + given.byteLength) : null;
    counts = bytes ? Array.from(new Float64Array(bytes)) : [];
    paint.mark();
  }
  const wired = wire(model);
  wired.on("change:counts", reload);
  for (const key of ["num_layers", "num_experts", "top_k", "numbers", "note", "enabled"]) wired.on(`change:${key}`, paint.mark);
  reload();
  return keepDrawing(canvas, wired, paint);
}

export default { render };
