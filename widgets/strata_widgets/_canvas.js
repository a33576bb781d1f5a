/** What canvas views share: size and colours at draw time, when to draw again, a cursor for pointer and keyboard. */

const LOOK_AGAIN_MS = 2000; // colours that change with neither size nor theme of the page are that old at most
const known = new WeakMap(); // canvas -> what the page said of it

/** Width and colours of a canvas. Asking the page makes it lay itself out at once, so its answers are kept. */
function lookAt(canvas) {
  const found = known.get(canvas);
  if (found?.width && performance.now() < found.until) return found;
  const style = getComputedStyle(canvas);
  const colors = new Map();
  const color = (name) => {
    if (!colors.has(name)) colors.set(name, style.getPropertyValue(name).trim() || "#666");
    return colors.get(name);
  };
  const [width, until] = [canvas.clientWidth, performance.now() + LOOK_AGAIN_MS];
  known.set(canvas, { width, until, color, ink: style.color, fontFamily: style.fontFamily });
  return known.get(canvas);
}

/** The width of a canvas on the page, in pixels of the page; 0 while it has none. */
export function widthOf(canvas) {
  return lookAt(canvas).width;
}

/** Size the canvas to its place on the page; its context, width and colours, or null while it has no width. */
export function prepare(canvas, height) {
  const { width, color, ink, fontFamily } = lookAt(canvas);
  const ratio = globalThis.devicePixelRatio || 1;
  if (!width) return null;
  const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
  const g = canvas.getContext("2d");
  if (canvas.width === columns && canvas.height === rows && g.reset) {
    g.reset(); // a size that is set again means new memory and a new layout
  } else {
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [columns, rows];
  }
  g.scale(ratio, ratio);
  g.font = `11px ${fontFamily}`;
  g.textBaseline = "middle";
  return { g, width, ink, color };
}

/** Look at the page again, and call `mark`, when the canvas changes its size or the page its theme; returns what stops that. */
function follow(canvas, mark) {
  const changed = () => {
    known.delete(canvas);
    mark();
  };
  const sized = new ResizeObserver(changed);
  sized.observe(canvas);
  const themed = new MutationObserver(changed);
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"] });
  return () => {
    sized.disconnect();
    themed.disconnect();
  };
}

/** Draw again as `follow` says; the cleanup of a view that is `wired` to its model and paints with `paint`. */
export function keepDrawing(canvas, wired, paint) {
  const unfollow = follow(canvas, paint.mark);
  return () => {
    wired.off();
    paint.stop();
    unfollow();
  };
}

/** A line through points. */
export function stroke(g, points) {
  g.beginPath();
  points.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
  g.stroke();
}

/** A round number at or above `value`, and a round step that divides it into 2 to 5. */
export function scale(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  const [factor, parts] = [[1, 4], [1.5, 3], [2, 4], [3, 3], [4, 4], [5, 5], [6, 3], [8, 4], [10, 4]].find(
    ([top]) => top * power >= value * (1 - 1e-12),
  );
  const top = factor * power;
  return { top, ticks: Array.from({ length: parts + 1 }, (_, i) => (top * i) / parts) };
}

/**
 * One of `count()` things under the pointer, or chosen with the arrow keys; -1 for none.
 * `at(x, y)` is the thing at a place; `row()` is how many things up and down jump over.
 */
export function cursor(canvas, { at, count, row = () => 1, mark }) {
  let index = -1;
  const move = (to) => {
    index = to;
    mark();
  };
  const leave = () => move(-1);
  canvas.addEventListener("pointermove", (event) => move(at(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const last = count() - 1;
    const from = index < 0 ? last : index;
    const moves = { ArrowLeft: from - 1, ArrowRight: from + 1, ArrowUp: from - row(), ArrowDown: from + row(), Home: 0, End: last };
    if (event.key === "Escape") leave();
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    move(Math.min(last, Math.max(0, moves[event.key])));
  });
  return () => (index < count() ? index : -1);
}
