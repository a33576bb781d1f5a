/** Samples of speed and what can be read off them. No drawing here. */

export const SPAN_S = 60;
const SPANS_S = [20, 30, SPAN_S];
const GAP_S = 0.75; // longer without a sample: nothing was generating, and the line breaks
export const BEFORE_S = 3; // stretch before a change that is averaged
export const SETTLE_S = 1; // a sample covers one second, so the first clean one after a change is a second later
const MIN_SAMPLES = 8;

/** Samples in a buffer of little-endian float64, four per sample. */
export function decode(view) {
  const data = new DataView(view.buffer, view.byteOffset, view.byteLength);
  const samples = [];
  for (let at = 0; at + 32 <= view.byteLength; at += 32) {
    const [t, total, stream, running] = [0, 8, 16, 24].map((field) => data.getFloat64(at + field, true));
    samples.push({ t, total, stream, running });
  }
  return samples;
}

/** `older` and then what is newer, cut to the span; both in order of time. */
export function join(older, newer) {
  const last = older.at(-1)?.t ?? -Infinity;
  const all = older.concat(newer.filter((sample) => sample.t > last));
  const start = (all.at(-1)?.t ?? 0) - SPAN_S;
  return all[0]?.t < start ? all.filter((sample) => sample.t >= start) : all;
}

/** Runs of samples without a gap and with a known value, as lists. */
export function pieces(samples, key) {
  const out = [];
  let last = -Infinity;
  for (const sample of samples) {
    if (Number.isFinite(sample[key])) {
      if (sample.t - last > GAP_S || !out.length) out.push([]);
      out.at(-1).push(sample);
      last = sample.t;
    }
  }
  return out;
}

/** The latest time and the length of the axis: the shortest of a few that holds all samples. */
export function timeAxis(samples, markers) {
  const end = Math.max(samples.at(-1)?.t ?? 0, markers.at(-1)?.t ?? 0);
  const held = end - (samples[0]?.t ?? end);
  return { end, span: SPANS_S.find((span) => span >= held) ?? SPAN_S };
}

/** Index of the sample nearest to time `t`; -1 without samples. */
export function nearest(samples, t) {
  let best = -1;
  samples.forEach((sample, i) => {
    if (best < 0 || Math.abs(sample.t - t) < Math.abs(samples[best].t - t)) best = i;
  });
  return best;
}

/**
 * What a change did to the speed per stream: means before and after, or null when that cannot be told, because
 * there are too few samples, the number of streams differed, or another change came in between.
 */
export function effect(samples, marker, markers) {
  const [from, to] = [marker.t - BEFORE_S, marker.t + SETTLE_S + BEFORE_S];
  if (markers.some((other) => other !== marker && other.t > from - SETTLE_S && other.t < to)) return null;
  const known = samples.filter((sample) => Number.isFinite(sample.stream) && sample.t >= from && sample.t <= to);
  const before = known.filter((sample) => sample.t <= marker.t);
  const after = known.filter((sample) => sample.t > marker.t + SETTLE_S);
  if (before.length < MIN_SAMPLES || after.length < MIN_SAMPLES) return null;
  if ([...before, ...after].some((sample) => sample.running !== before[0].running)) return null;
  const mean = (list) => list.reduce((sum, sample) => sum + sample.stream, 0) / list.length;
  return { before: mean(before), after: mean(after), streams: before[0].running };
}

/** Which of two rows each label goes to, left to right, so that none overlap; -1 where there is no room. */
export function placeLabels(labels, width) {
  const free = [-Infinity, -Infinity];
  return labels.map(({ x, w }) => {
    const left = Math.min(x, width - w);
    const row = free.findIndex((end) => end <= left);
    if (row >= 0) free[row] = left + w + 6;
    return { row, left };
  });
}
