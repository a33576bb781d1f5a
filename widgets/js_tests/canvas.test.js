import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { installPage } from "./fake_page.js";
import { cursor, scale } from "../strata_widgets/_canvas.js";

beforeEach(() => installPage());

test("the scale is round and holds the value", () => {
  for (const value of [0.3, 1, 7, 99, 101, 240, 1234]) {
    const { top, ticks } = scale(value);
    assert.ok(top >= value && top <= 2 * value, `${value} -> ${top}`);
    assert.equal(ticks[0], 0);
    assert.equal(ticks.at(-1), top);
  }
});

test("the cursor follows the pointer and the arrow keys, and stays inside", () => {
  const canvas = document.createElement("canvas");
  let marks = 0;
  const index = cursor(canvas, { at: (x) => Math.floor(x / 10), count: () => 8, row: () => 4, mark: () => (marks += 1) });
  assert.equal(index(), -1);
  canvas.fire("pointermove", { offsetX: 25, offsetY: 0 });
  assert.equal(index(), 2);
  canvas.fire("keydown", { key: "ArrowDown" });
  assert.equal(index(), 6);
  assert.ok(canvas.fire("keydown", { key: "ArrowDown" }), "the page does not scroll");
  assert.equal(index(), 7);
  canvas.fire("keydown", { key: "Home" });
  assert.equal(index(), 0);
  canvas.fire("keydown", { key: "Escape" });
  assert.equal(index(), -1);
  assert.equal(marks, 5);
});
