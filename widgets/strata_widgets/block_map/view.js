/** The KV pool on a canvas: one square per block, coloured by the request that holds it. */
import { h, painter, quiet, roving, setText, tipOf, tipped, wire } from "../_shared.js";
import { cursor, keepDrawing, prepare, widthOf } from "../_canvas.js";

const [FREE, CACHED, SHARED, FIRST_OWNER] = [0, 1, 2, 3];
const SIZES = [14, 12, 10, 8, 7, 6, 5, 4, 3]; // pixels of a cell, the largest that fits is taken
const MOST_HEIGHT = 190;

/** The largest cell with which `count` cells fit, how many are in a row, and the height they need. */
export function layout(count, width) {
  for (const size of SIZES) {
    const columns = Math.max(1, Math.floor(width / size));
    const height = Math.ceil(count / columns) * size;
    if (height <= MOST_HEIGHT || size === SIZES.at(-1)) return { size, columns, height: Math.max(size, height) };
  }
  return null;
}

/** What a cell is, in words. */
export function cellText(cells, i, owners, perCell, blockSize) {
  const from = i * perCell;
  const name = perCell === 1 ? `block ${from}` : `blocks ${from} to ${from + perCell - 1}`;
  const tokens = `tokens per block: ${blockSize}`;
  const what = { [FREE]: "free", [CACHED]: "kept by the prefix cache, held by nobody", [SHARED]: "shared by several requests" };
  return `${name}: ${what[cells[i]] ?? `held by ${owners[cells[i] - FIRST_OWNER]?.title ?? "a request"}`}; ${tokens}`;
}

function drawCells(canvas, { cells, owners, chosen }) {
  const { size, columns, height } = layout(cells.length, widthOf(canvas) || 1);
  const page = prepare(canvas, height);
  if (!page) return;
  const { g, ink, color } = page;
  const owned = owners.map((owner) => color(`--s-r${owner.color}`));
  const inner = size > 4 ? size - 1.5 : size - 0.5;
  cells.forEach((cell, i) => {
    const [x, y] = [(i % columns) * size, Math.floor(i / columns) * size];
    g.globalAlpha = cell === FREE ? 0.08 : cell === CACHED ? 0.32 : 1;
    g.fillStyle = cell >= FIRST_OWNER ? (owned[cell - FIRST_OWNER] ?? ink) : ink;
    g.fillRect(x, y, inner, inner);
    g.globalAlpha = 1;
    if (cell === SHARED && size >= 6) {
      g.fillStyle = color("--s-paper");
      g.fillRect(x + inner / 2 - 1, y + inner / 2 - 1, 2, 2); // a dot, so that it differs by more than its shade
    }
  });
  if (chosen < 0) return;
  g.strokeStyle = ink;
  g.lineWidth = 2;
  g.strokeRect((chosen % columns) * size - 1, Math.floor(chosen / columns) * size - 1, inner + 2, inner + 2);
}

function kind({ key, label, count, tip }) {
  const words = [h("span", { class: `s-swatch ${key}`, "aria-hidden": true }), `${label} `, h("b", {}, String(count))];
  return h("li", { class: "s-tipped", ...tipped }, ...words, tipOf(tip));
}

function render({ model, el }) {
  el.classList.add("strata", "strata-block-map");
  const canvas = h("canvas", { ...quiet, role: "slider", tabindex: 0, "aria-label": "Blocks of the KV pool" });
  const line = h("p", { class: "s-readout", "aria-live": "off" });
  const legend = h("ul", { class: "s-facts", "aria-label": "Blocks by kind" });
  el.append(h("h3", { class: "s-heading" }, "KV blocks"), legend, h("figure", {}, canvas, h("figcaption", {}, line)));
  const stops = roving(legend);
  let cells = [];
  const grid = () => layout(cells.length, widthOf(canvas) || 1);
  const index = cursor(canvas, {
    at: (x, y) => Math.floor(y / grid().size) * grid().columns + Math.floor(x / grid().size),
    count: () => cells.length,
    row: () => grid().columns,
    mark: () => paint.soon(),
  });
  let shownKinds = "";

  const paint = painter(() => {
    const [owners, perCell, kinds] = ["owners", "per_cell", "kinds"].map((key) => model.get(key));
    const chosen = index();
    drawCells(canvas, { cells, owners, chosen });
    if (JSON.stringify(kinds) !== shownKinds) stops.replace(...kinds.map(kind));
    shownKinds = JSON.stringify(kinds);
    const each = perCell === 1 ? "One square is one block" : `One square is ${perCell} blocks`;
    const size = model.get("block_size");
    const idle = cells.length ? `${each} of ${size} tokens. Move over the map, or focus it and use the arrow keys.` : "The pool is shown once the engine runs.";
    const text = chosen >= 0 ? cellText(cells, chosen, owners, perCell, size) : idle;
    setText(line, text);
    canvas.setAttribute("aria-valuemin", 0);
    canvas.setAttribute("aria-valuemax", Math.max(0, cells.length - 1));
    canvas.setAttribute("aria-valuenow", Math.max(0, chosen));
    canvas.setAttribute("aria-valuetext", chosen >= 0 ? text : kinds.map(({ label, count }) => `${label} ${count}`).join(", ") || text);
  }, el);
  function reload() {
    const given = model.get("cells");
    cells = given.byteLength ? Array.from(new Uint8Array(given.buffer, given.byteOffset, given.byteLength)) : [];
    paint.mark();
  }
  const wired = wire(model);
  wired.on("change:cells", reload);
  for (const key of ["per_cell", "block_size", "owners", "kinds"]) wired.on(`change:${key}`, paint.mark);
  reload();
  return keepDrawing(canvas, wired, paint);
}

export default { render };
