/** Steps of the engine and what can be read off them. No drawing here. */

export const KEPT = 240; // steps on the page
const FIXED = 4; // step, whole, prefill, decode; then one field per cause
const OUTLIER = 4; // times the median: taller bars are cut and marked

/** Steps in a buffer of little-endian float64. */
export function decodeSteps(view, causes) {
  const data = new DataView(view.buffer, view.byteOffset, view.byteLength);
  const size = 8 * (FIXED + causes);
  const steps = [];
  for (let at = 0; at + size <= view.byteLength; at += size) {
    const field = (i) => data.getFloat64(at + 8 * i, true);
    const parts = Array.from({ length: causes }, (_, i) => field(FIXED + i));
    steps.push({ step: field(0), whole: field(1), prefill: field(2), decode: field(3), parts });
  }
  return steps;
}

/** `older` and then what is newer, cut to what is kept. A step number that falls back begins anew. */
export function joinSteps(older, newer) {
  const last = older.at(-1)?.step ?? -1;
  const fresh = newer.filter((step) => step.step > last);
  return fresh.length ? older.concat(fresh).slice(-KEPT) : older;
}

/** Mean milliseconds of each cause, and of the whole, over decode steps; over all steps where there is none. */
export function means(steps) {
  const decodes = steps.filter((step) => step.prefill === 0);
  const used = decodes.length ? decodes : steps;
  if (!used.length) return null;
  const mean = (of) => used.reduce((sum, step) => sum + of(step), 0) / used.length;
  return {
    count: used.length,
    only: decodes.length ? "decode steps" : "steps",
    whole: mean((step) => step.whole),
    parts: used[0].parts.map((_, i) => mean((step) => step.parts[i])),
  };
}

/** The top of the axis: holds every step but those far above the median, which are cut. */
export function ceilingOf(steps) {
  const sorted = steps.map((step) => step.whole).toSorted((a, b) => a - b);
  const median = sorted[Math.floor(sorted.length / 2)] ?? 1;
  return Math.min(sorted.at(-1) ?? 1, OUTLIER * median) || 1;
}

/** 0.04 ms as 40 µs, 1.24 ms, 18.3 ms, 240 ms. */
export function millis(ms) {
  if (ms < 0.0005) return "0 µs";
  if (ms < 0.1) return `${Math.round(ms * 1000)} µs`;
  return `${ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
}
