"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const canvas = byId("canvas"), pen = canvas.getContext("2d"), scroll = byId("scroll");
  const listing = byId("listing"), tip = byId("tip");

  const OTHER = "#a0a4aa", WAITING = "#d9544d";
  const LEFT = 78, RIGHT = 14, AXIS = 30, TITLE = 22, ROW = 16, LINE = 18; // pixels
  const SMALLEST_PANE = 125, MOST_LABELS = 400, CLICK = 4, NARROWEST = 1e-4;
  const MOST_OPS = 12; // in the table of times
  const MOST_INK = 20; // times a pane's height: a longer line would hide what is below it
  const SMALL = 0.02, MOST_LETTERS = 72, MOST_RESETS = 100;

  let view, tracks = [], links = new Map(), colour = new Map(), span = 1;
  let x0 = 0, x1 = 1; // what is visible, in positions
  let inOrder = false, order = null; // one step for each event, and the sorted times of all
  let selected = null, hovered = null, marked = [0, -1];
  let terms = [], matches = [], match = -1, foundRows = [];
  let rows = { program: [], row: [], first: new Map() };
  let ink = {}, width = 0, height = 0, cursor = null;

  // --- texts ---

  const homes = new Map(data.strings.map((name, i) => [name, data.homes[i]]));
  const text = (number) => data.strings[number] ?? "";
  const grouped = (number) => number.toLocaleString("en-US");
  const kind = (track, i) => text((track.at.kind ?? track.at.name)[i]) || (track.at.type ? text(track.at.type[i]) : "");

  function bytes(number) {
    for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (number >= size) return `${grouped(number)} bytes (${(number / size).toFixed(1)} ${unit})`;
    }
    return `${grouped(number)} bytes`;
  }

  function clock(time, step = time / 1000) { // both in microseconds
    const [unit, size] = Math.abs(time) >= 1e6 ? ["s", 1e6] : Math.abs(time) >= 1e3 ? ["ms", 1e3] : ["µs", 1];
    const exact = Math.max(Math.ceil(-Math.log10(Math.abs(step) / size || 1)), 0);
    const digits = Math.min(exact, size === 1 ? 1 : 4); // a tenth of a microsecond is all that is known
    return `${(time / size).toFixed(digits)} ${unit}`;
  }

  const time = (value) => (view.clock ? clock(value) : `moment ${grouped(value)}`);

  function lasts(track, i) {
    const length = track.at.end[i] - track.at.start[i];
    return view.clock ? clock(length) : `${grouped(length)} moment${length === 1 ? "" : "s"}`;
  }

  function escaped(string) {
    return string.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  }

  /** What is known of a tensor or a call: its title, and pairs of a name and a value. */
  function facts(track, i) {
    const at = track.at, facts = [];
    const title = at.type ? [text(at.name[i]), text(at.type[i])].filter(Boolean).join(": ") : text(at.name[i]);
    if (track.isPane) {
      if (at.kind[i] !== at.name[i]) facts.push(["is", text(at.kind[i])]);
      facts.push(["size", bytes(at.nbytes[i])], ["address", `${grouped(at.offset[i])} in ${track.name}`]);
    } else {
      if (text(at.about[i])) facts.push(["takes", text(at.about[i])]);
      if (at.bytes[i]) facts.push(["touches", bytes(at.bytes[i])]);
      facts.push(["on", track.name]);
    }
    facts.push(["begins", time(at.start[i])]);
    if (view.clock) facts.push(["ends", time(at.end[i])], ["lasts", lasts(track, i)]);
    else if (at.end[i] - at.start[i] > 1) facts.push(["ends", `with ${time(at.end[i] - 1)}`], ["lasts", lasts(track, i)]);
    if (at.line[i]) facts.push(["line", text(at.line[i])]);
    const source = data.sources[at.line[i]];
    if (source) facts.push(["source", source]);
    return { title, facts };
  }

  /** What there is to say of a track: of a pane, how much it took up; and what is forgotten. */
  function summary(track) {
    const parts = [];
    const held = view.clock ? "capacity" : "plan of";
    if (track.isPane) parts.push(`peak use ${bytes(track.most)}`, `${held} ${bytes(track.capacity)}`);
    if (track.forgotten) {
      const kind = track.isPane ? "tensors" : "calls or waits";
      parts.push(`${grouped(track.forgotten)} ${kind} before ${time(track.since)} are not kept`);
      if (track.isPane) parts.push(`peak use since then ${bytes(track.bound)}`);
    }
    if (track.isPane && track.top > track.capacity) {
      parts.push(`addresses up to ${bytes(track.top)} count what it gave back`);
    }
    return parts;
  }

  // --- what is shown ---

  function show(number) {
    view = data.views[number];
    inOrder = false;
    order = null;
    tracks = [
      ...view.panes.map((pane) => ({ ...pane, isPane: true, at: pane.blocks, low: 0, high: 0 })),
      ...view.lanes.map((lane) => ({ ...lane, isPane: false, at: lane.spans })),
    ];
    for (const track of tracks) {
      track.count = track.at.start?.length ?? 0;
      if (track.isPane) track.high = track.full = 1.08 * Math.max(track.top, track.bound, 64);
      track.closed = track.isPane && track.most < SMALL * view.panes[0].most;
    }
    selected = hovered = null;
    match = -1;
    paintKinds();
    link();
    list();
    place();
    fit();
    move(view.since, span); // where all is kept of every track, or most
    search();
    details();
    byId("order").hidden = !view.clock;
    byId("view").value = String(number);
  }

  /** Give the kinds that take up most a colour, and group each track by colour. */
  function paintKinds() {
    const area = new Map();
    for (const track of tracks) {
      for (let i = 0; i < track.count; i++) {
        const size = (track.isPane ? track.at.nbytes[i] / track.full : 0.02) * (track.at.end[i] - track.at.start[i]);
        const name = kind(track, i);
        area.set(name, (area.get(name) ?? 0) + size);
      }
    }
    const ranked = [...area.keys()].filter((name) => !name.startsWith("waits for "));
    ranked.sort((a, b) => area.get(b) - area.get(a));
    const half = data.colours.length / 2, taken = new Set();
    colour = new Map();
    for (const name of ranked.slice(0, half)) { // as svg.py does
      let number = homes.get(name) ?? half;
      while (taken.has(number)) number = half + ((number + 1) % half);
      taken.add(number);
      colour.set(name, data.colours[number]);
    }
    for (const track of tracks) {
      track.groups = new Map();
      track.paint = [];
      for (let i = 0; i < track.count; i++) {
        const name = kind(track, i);
        const paint = name.startsWith("waits for ") ? WAITING : colour.get(name) ?? OTHER;
        if (!track.groups.has(paint)) track.groups.set(paint, []);
        track.groups.get(paint).push(i);
        track.paint.push(paint);
      }
    }
    const others = ranked.length - colour.size;
    byId("legend").innerHTML = [...colour]
      .map(([name, paint]) => `<button type="button" title="Search for it"><i style="background:${paint}"></i>${escaped(name)}</button>`)
      .join("") + (others > 0 ? `<button type="button" disabled><i style="background:${OTHER}"></i>${others} others</button>` : "");
  }

  /** Find what an instruction makes and runs: tensors and calls by program and pc. */
  function link() {
    links = new Map();
    for (const track of tracks) {
      for (let i = 0; i < track.count; i++) {
        if (track.at.program[i] < 0 || track.at.pc[i] < 0) continue;
        const key = `${track.at.program[i]} ${track.at.pc[i]}`;
        if (!links.has(key)) links.set(key, []);
        links.get(key).push({ track, i });
      }
    }
  }

  /** Where each item begins and ends in positions: times, or the numbers of events. */
  function place() {
    if (inOrder && !order) {
      const times = new Set([0, view.last]);
      for (const track of tracks) {
        for (const column of [track.at.start, track.at.end, track.resets, track.used?.at]) {
          for (const value of column ?? []) times.add(value);
        }
      }
      order = Float64Array.from(times).sort();
    }
    for (const track of tracks) {
      track.start = Float64Array.from(track.at.start ?? [], position);
      track.end = Float64Array.from(track.at.end ?? [], position);
      if (track.isPane) {
        track.usedAt = Float64Array.from(track.used.at, position);
        track.resetAt = Float64Array.from(track.resets, position);
      }
    }
    span = inOrder ? order.length - 1 : view.last || 1;
  }

  function position(value) {
    return inOrder ? lowerBound(order, value) : value;
  }

  function lowerBound(sorted, value) {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function fit() {
    x0 = 0;
    x1 = span;
    for (const track of tracks) if (track.isPane) [track.low, track.high] = [0, track.full];
    draw();
  }

  /** Put the tracks below each other; panes share what lanes leave. */
  function layOut() {
    const box = scroll.getBoundingClientRect();
    [width, height] = [Math.floor(box.width), Math.floor(box.height)];
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const isShared = (track) => track.isPane && !track.closed;
    const fixed = (track) => (track.closed ? TITLE : TITLE + ROW * Math.max(track.rows, 1) + 6);
    const taken = tracks.reduce((sum, track) => sum + (isShared(track) ? 0 : fixed(track)), 0);
    const left = Math.floor((height - AXIS - taken) / (tracks.filter(isShared).length || 1));
    let top = 0;
    for (const track of tracks) {
      track.y = top;
      track.height = isShared(track) ? Math.max(left, SMALLEST_PANE) : fixed(track);
      top += track.height;
    }
    byId("spacer").style.height = `${Math.max(top + AXIS - height, 0)}px`;
    paint(); // at once: a resized canvas is empty
  }

  const toX = (at) => LEFT + ((at - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const fromX = (x) => x0 + ((x - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
  const bodyTop = (track) => track.y - scroll.scrollTop + TITLE;
  const bodyHeight = (track) => track.height - TITLE - 8;
  const toY = (track, address) =>
    bodyTop(track) + bodyHeight(track) * (1 - (address - track.low) / (track.high - track.low));
  const fromY = (track, y) =>
    track.low + (1 - (y - bodyTop(track)) / bodyHeight(track)) * (track.high - track.low);

  // --- drawing ---

  let asked = 0;
  function draw() {
    if (!asked) asked = requestAnimationFrame(() => { asked = 0; paint(); });
  }

  function paint() {
    if (!width) return;
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    for (const track of tracks) {
      const top = track.y - scroll.scrollTop;
      if (top > height - AXIS || top + track.height < 0) continue;
      pen.save();
      pen.beginPath();
      pen.rect(0, top, width, track.height);
      pen.clip();
      if (track.isPane && !track.closed) paintPane(track);
      else if (!track.closed) paintLane(track);
      paintTitle(track);
      pen.restore();
    }
    paintAxis();
  }

  function write(content, x, y, style = ink.soft, align = "left") {
    pen.fillStyle = style;
    pen.textAlign = align;
    pen.fillText(content, x, y);
  }

  function paintTitle(track) {
    const y = track.y - scroll.scrollTop;
    pen.globalAlpha = 1;
    pen.fillStyle = ink.paper;
    pen.fillRect(0, y, width, TITLE - 3);
    pen.fillStyle = ink.line;
    pen.fillRect(0, y, width, 1);
    pen.font = "600 12px system-ui, sans-serif";
    const name = `${track.closed ? "▸" : "▾"} ${track.name}`;
    write(name, 10, y + 15, ink.ink);
    const end = 10 + pen.measureText(name).width + 14;
    pen.font = "12px system-ui, sans-serif";
    if (!track.isPane) return;
    let about = summary(track);
    if (cursor !== null && cursor < position(track.since)) about = ["the use at this time was not kept"];
    else if (cursor !== null) about = [`${grouped(usedAt(track, cursor))} bytes in use at ${timeAt(cursor)}`];
    while (about.length && end + pen.measureText(about.join("; ")).width >= width - RIGHT) about.pop();
    write(about.join("; "), width - RIGHT, y + 15, ink.soft, "right");
  }

  /** Grey out the time of which a track has forgotten what there was. */
  function paintForgotten(track) {
    if (!track.forgotten) return;
    const left = Math.max(toX(0), LEFT), right = toX(position(track.since));
    if (right <= LEFT) return;
    pen.fillStyle = ink.grid;
    pen.fillRect(left, bodyTop(track) - 3, right - left, bodyHeight(track) + 3);
    const [said] = summary(track).slice(track.isPane ? 2 : 0);
    if (pen.measureText(said).width < right - left - 12) write(said, left + 6, bodyTop(track) + 12);
  }

  const timeAt = (at) =>
    time(inOrder ? order[Math.min(Math.max(Math.floor(at), 0), order.length - 1)] : view.clock ? at : Math.floor(at));

  function usedAt(track, at) {
    const i = lowerBound(track.usedAt, at + 1e-9) - 1;
    return i < 0 ? 0 : track.used.bytes[i];
  }

  function paintPane(track) {
    const bottom = bodyTop(track) + bodyHeight(track);
    paintForgotten(track);
    const step = roundBytes((track.high - track.low) / 5);
    for (let a = Math.ceil(track.low / step) * step; a <= track.high; a += step) {
      const y = Math.round(toY(track, a)) + 0.5;
      pen.fillStyle = ink.grid;
      pen.fillRect(LEFT, y, width - LEFT - RIGHT, 1);
      if (y > bodyTop(track) + 4) write(brief(a, step), LEFT - 8, Math.min(y + 4, bottom), ink.soft, "right");
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, bodyTop(track) - 3, width - LEFT - RIGHT, bodyHeight(track) + 3);
    pen.clip();
    let labels = 0;
    for (const [paint, items] of track.groups) {
      pen.fillStyle = paint;
      for (const i of items) {
        if (track.end[i] < x0 || track.start[i] > x1) continue;
        const [x, y, w, h] = boxOf(track, i);
        if (y > bottom || y + h < bodyTop(track)) continue;
        pen.globalAlpha = terms.length && !track.matched[i] ? 0.13 : 0.92;
        pen.fillRect(x, y, w > 3 ? w - 0.6 : w, h > 3 ? h - 0.6 : h);
        if (w > 44 && h > 15 && labels < MOST_LABELS) {
          labels++;
          label(text(track.at.name[i]) || kind(track, i), x, y + Math.min(h / 2 + 4, h - 4), w);
          pen.fillStyle = paint;
        }
      }
    }
    pen.globalAlpha = 1;
    const resets = track.resetAt.slice(lowerBound(track.resetAt, x0), lowerBound(track.resetAt, x1));
    for (const at of resets.length > MOST_RESETS ? [] : resets) { // more would hide all else
      pen.fillStyle = ink.soft;
      for (let y = bodyTop(track); y < bottom; y += 5) pen.fillRect(toX(at), y, 0.7, 1.5);
    }
    paintUsed(track);
    level(track, track.bound, ink.bound, track.forgotten ? "peak use since then" : "peak use");
    outline(track);
    pen.restore();
    pen.fillStyle = ink.soft;
    pen.fillRect(LEFT - 1, bodyTop(track), 1, bodyHeight(track));
    pen.fillRect(LEFT - 1, bottom, width - LEFT - RIGHT + 1, 1);
  }

  /** The op's name inside a box, if there is room for all of it. */
  function label(content, x, y, w) {
    const left = Math.max(x, LEFT), room = Math.min(x + w, width - RIGHT) - left - 8;
    if (pen.measureText(content).width <= room) write(content, left + 4, y, "#111418");
  }

  function boxOf(track, i) {
    const x = toX(track.start[i]), w = Math.max(toX(track.end[i]) - x, 0.6);
    if (!track.isPane) return [x, bodyTop(track) + ROW * track.at.row[i], w, ROW - 2];
    const y = toY(track, track.at.offset[i] + track.at.nbytes[i]);
    return [x, y, w, Math.max(toY(track, track.at.offset[i]) - y, 0.6)];
  }

  /** The bytes in use as a staircase: the peak of each stretch of pixels, which is as long as it
      takes that the line hides no colours. */
  function paintUsed(track) {
    let steps = [], length = Infinity;
    for (let stretch = 0.5; length > MOST_INK * bodyHeight(track); stretch *= 2) {
      steps = stairs(track, stretch);
      length = steps.reduce((sum, [, y], i) => sum + Math.abs(y - (steps[i - 1]?.[1] ?? y)), 0);
    }
    pen.strokeStyle = ink.ink;
    pen.lineWidth = 1.2;
    pen.beginPath();
    let before = toY(track, 0);
    for (const [x, y] of [...steps, [toX(Math.min(span, x1)), steps.at(-1)?.[1] ?? before]]) {
      pen.lineTo(x, before);
      pen.lineTo(x, y);
      before = y;
    }
    pen.stroke();
  }

  /** Where the staircase goes to another height, in pixels, with the peak of each stretch. */
  function stairs(track, stretch) {
    const at = track.usedAt, bytes = track.used.bytes, steps = [];
    const cell = (i) => Math.floor(toX(at[i]) / stretch);
    let i = Math.max(lowerBound(at, x0) - 1, 0), last = 0;
    while (i < at.length && at[i] <= x1) {
      const here = cell(i);
      let most = last;
      for (; i < at.length && at[i] <= x1 && cell(i) === here; i++) most = Math.max(most, last = bytes[i]);
      steps.push([here * stretch, toY(track, most)], [(here + 1) * stretch, toY(track, last)]);
    }
    return steps;
  }

  function level(track, address, style, content) {
    const y = toY(track, address);
    pen.strokeStyle = style;
    pen.lineWidth = 1.2;
    pen.setLineDash([7, 4]);
    pen.beginPath();
    pen.moveTo(LEFT, y);
    pen.lineTo(width - RIGHT, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 3;
    pen.strokeStyle = ink.paper;
    pen.textAlign = "right";
    const base = y - bodyTop(track) < 12 ? y + 13 : y - 4; // a label above the pane would be cut
    pen.strokeText(content, width - RIGHT - 5, base);
    write(content, width - RIGHT - 5, base, style, "right");
  }

  function paintLane(track) {
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, bodyTop(track) - 3, width - LEFT - RIGHT, track.height);
    pen.clip();
    paintForgotten(track);
    const painted = new Float64Array(track.rows).fill(-Infinity); // up to which pixel, by row
    const count = Math.min(lowerBound(track.start, x1 + 1e-9), track.count);
    for (let i = 0; i < count; i++) {
      if (track.end[i] < x0) continue;
      const [x, y, w, h] = boxOf(track, i), row = track.at.row[i];
      const dim = terms.length && !track.matched[i];
      if (w < 1 && x < painted[row] && (dim || !terms.length)) continue;
      painted[row] = x + w + 0.4;
      pen.globalAlpha = dim ? 0.15 : 0.92;
      pen.fillStyle = track.paint[i];
      pen.fillRect(x, y, w > 3 ? w - 0.6 : w, h);
      if (w > 44) label(text(track.at.name[i]), x, y + 11, w);
    }
    pen.globalAlpha = 1;
    outline(track);
    pen.restore();
  }

  /** Outline what is hovered, selected, or made by the same instruction. */
  function outline(track) {
    const around = (each, style, thick) => {
      if (each?.track !== track) return;
      const [x, y, w, h] = boxOf(track, each.i);
      pen.strokeStyle = style;
      pen.lineWidth = thick;
      pen.strokeRect(x, y, Math.max(w, 2), Math.max(h, 2));
    };
    for (const each of linked(selected).slice(0, MOST_LABELS)) around(each, ink.accent, 1);
    around(hovered, ink.ink, 1.5);
    around(selected, ink.ink, 2.5);
  }

  function linked(item) {
    return item ? links.get(`${item.track.at.program[item.i]} ${item.track.at.pc[item.i]}`) ?? [] : [];
  }

  function paintAxis() {
    const y = height - AXIS;
    pen.fillStyle = ink.paper;
    pen.fillRect(0, y, width, AXIS);
    pen.fillStyle = ink.line;
    pen.fillRect(0, y, width, 1);
    let step = roundNumber((x1 - x0) / Math.max((width - LEFT - RIGHT) / 110, 1));
    if (inOrder || !view.clock) step = Math.max(step, 1);
    for (let at = Math.ceil(x0 / step) * step; at <= x1; at += step) {
      const x = toX(at);
      pen.fillStyle = ink.soft;
      pen.fillRect(x, y, 1, 5);
      const label = inOrder || !view.clock ? grouped(Math.round(at)) : clock(at, step);
      if (x < width - 30) write(label, x, y + 19, ink.soft, "center");
    }
    write(inOrder ? "events" : view.clock ? "time" : "moments", 10, y + 19);
    if (cursor !== null) {
      pen.fillStyle = ink.soft;
      pen.globalAlpha = 0.6;
      pen.fillRect(toX(cursor), 0, 1, y);
      pen.globalAlpha = 1;
    }
  }

  function roundNumber(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least);
  }

  function roundBytes(least) {
    return Math.max(2 ** Math.ceil(Math.log2(least)), 1);
  }

  function brief(number, step) {
    for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (number >= size) return `${(number / size).toFixed(step < size ? 1 : 0)} ${unit}`;
    }
    return number ? `${number} B` : "0";
  }

  // --- moving ---

  function move(left, right) {
    const least = inOrder || !view.clock ? 2 : Math.min(NARROWEST * span, 0.5);
    const length = Math.min(Math.max(right - left, Math.min(least, span)), span);
    x0 = Math.min(Math.max((left + right - length) / 2, 0), span - length);
    x1 = x0 + length;
    draw();
  }

  function zoom(factor, at = (x0 + x1) / 2) {
    move(at - (at - x0) * factor, at + (x1 - at) * factor);
  }

  function pan(share) {
    const by = share * (x1 - x0);
    move(x0 + by, x1 + by);
  }

  function moveAddresses(track, low, high) {
    const length = Math.min(Math.max(high - low, 64), track.full);
    track.low = Math.min(Math.max((low + high - length) / 2, 0), track.full - length);
    track.high = track.low + length;
    draw();
  }

  function zoomTo({ track, i }) {
    const length = Math.max(track.end[i] - track.start[i], 1e-9);
    move(track.start[i] - length, track.end[i] + length);
    if (!track.isPane) return;
    const size = track.at.nbytes[i];
    moveAddresses(track, track.at.offset[i] - 2 * size, track.at.offset[i] + 3 * size);
  }

  /** Move so that the item can be seen. */
  function reveal({ track, i }) {
    const pixels = toX(track.end[i]) - toX(track.start[i]);
    const middle = (track.start[i] + track.end[i]) / 2;
    let length = x1 - x0;
    if (pixels < 4) length *= Math.max(pixels, 0.001) / 40;
    if (pixels < 4 || track.end[i] < x0 || track.start[i] > x1) move(middle - length / 2, middle + length / 2);
    if (track.isPane && (track.at.offset[i] > track.high || track.at.offset[i] + track.at.nbytes[i] < track.low)) {
      moveAddresses(track, 0, track.full);
    }
    if (track.closed) toggle(track);
    const top = track.y - scroll.scrollTop;
    if (top < 0 || top + track.height > height - AXIS) scroll.scrollTop = track.y;
  }

  function toggle(track) {
    track.closed = !track.closed;
    layOut();
  }

  // --- what is under the pointer ---

  /** The track that has its title there. */
  const titleAt = (y) => tracks.find((each) => {
    const top = each.y - scroll.scrollTop;
    return y < height - AXIS && y >= top && y < top + TITLE - 3;
  });

  function itemAt(x, y) {
    if (x < LEFT || x > width - RIGHT || y > height - AXIS) return null;
    const track = tracks.find((each) => {
      const top = each.y - scroll.scrollTop;
      return y >= top && y < top + each.height;
    });
    if (!track || track.closed) return null;
    let near = null;
    for (let i = track.count - 1; i >= 0; i--) {
      const [left, top, w, h] = boxOf(track, i);
      if (x >= left && x < left + w && y >= top && y < top + h) return { track, i };
      if (!near && x >= left - 1.5 && x < left + w + 1.5 && y >= top - 1.5 && y < top + h + 1.5) near = { track, i };
    }
    return near;
  }

  function hover(event) {
    const [x, y] = [event.offsetX, event.offsetY];
    hovered = itemAt(x, y);
    cursor = x >= LEFT && x <= width - RIGHT ? fromX(x) : null;
    draw();
    tip.hidden = !hovered;
    if (!hovered) return;
    const { title, facts: pairs } = facts(hovered.track, hovered.i);
    const line = ([name, value]) => (name === "source" ? `<code>${escaped(value)}</code>` : escaped(`${name} ${value}`));
    tip.innerHTML = `<b>${escaped(title)}</b>${pairs.map(line).join("\n")}`;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width < window.innerWidth;
    tip.style.left = `${Math.max(right ? event.clientX + 16 : event.clientX - box.width - 12, 4)}px`;
    tip.style.top = `${Math.max(Math.min(event.clientY + 14, window.innerHeight - box.height - 6), 4)}px`;
  }

  function unhover() {
    hovered = cursor = null;
    tip.hidden = true;
    draw();
  }

  // --- selecting ---

  function select(item, { inListing = true, inChart = false } = {}) {
    selected = item;
    if (item && item.track.at.program[item.i] >= 0) {
      mark(item.track.at.program[item.i], item.track.at.pc[item.i], inListing);
    } else if (inListing) {
      marked = [0, -1];
      paintRows();
    }
    if (item && inChart) reveal(item);
    details();
    draw();
    remember();
  }

  function details() {
    const parts = [];
    if (selected) {
      const { title, facts: pairs } = facts(selected.track, selected.i);
      parts.push(`<h2>${escaped(title)}</h2><dl>`);
      for (const [name, value] of pairs) {
        const shown = name === "source" ? `<code>${escaped(value)}</code>` : escaped(value);
        parts.push(`<dt>${name}</dt><dd>${shown}</dd>`);
      }
      parts.push("</dl>");
      const program = selected.track.at.program[selected.i];
      const plan = view.clock ? data.views.findIndex((each) => !each.clock && each.programs[0] === program) : -1;
      if (plan >= 0) parts.push(`<p><button type="button" data-view="${plan}">show its scratch memory</button></p>`);
    } else {
      parts.push(`<h2>${escaped(view.name)}</h2><dl>`);
      for (const track of tracks) {
        const about = summary(track);
        if (track.isPane) about.unshift(`${grouped(track.count)} tensor${track.count === 1 ? "" : "s"}`);
        if (about.length) parts.push(`<dt>${escaped(track.name)}</dt><dd>${about.join("; ")}</dd>`);
      }
      if (view.since) parts.push(`<dt>the view</dt><dd>begins at ${time(view.since)}: 0 shows earlier tensors, if kept</dd>`);
      parts.push("</dl>", view.clock ? timesByOp() : "", "<p>Click a tensor or an instruction to see where it comes from. Press ? for keys.</p>");
    }
    byId("details").innerHTML = parts.join("");
  }

  /** A table of the ops that took longest on VMs: how often, how long, and the share of all. What
      ran within another call counts as its own alone. */
  function timesByOp() {
    const times = new Map();
    for (const track of tracks) {
      const at = track.at, within = [];
      for (let i = 0; !track.isPane && i < track.count; i++) {
        const name = kind(track, i), length = at.end[i] - at.start[i];
        if (name.startsWith("waits for ")) continue;
        while (within.length && at.end[within.at(-1)] <= at.start[i]) within.pop();
        if (within.length) times.get(kind(track, within.at(-1)))[1] -= length;
        within.push(i);
        const [count, sum] = times.get(name) ?? [0, 0];
        times.set(name, [count + 1, sum + length]);
      }
    }
    const ranked = [...times].sort(([, a], [, b]) => b[1] - a[1]);
    const total = ranked.reduce((sum, [, [, time]]) => sum + time, 0);
    const rest = ranked.splice(MOST_OPS).reduce(([n, sum], [, [count, time]]) => [n + count, sum + time], [0, 0]);
    if (rest[0]) ranked.push(["others", rest]);
    const row = ([name, [count, time]]) =>
      `<tr><td>${escaped(name)}</td><td>${grouped(count)}</td><td>${clock(time)}</td><td>${((100 * time) / total).toFixed(1)} %</td></tr>`;
    return total ? `<table><tr><th>time by op</th><th>calls</th><th>time</th><th>share</th></tr>${ranked.map(row).join("")}</table>` : "";
  }

  /** The item before or after the selected one. */
  function step(by) {
    const track = selected?.track ?? tracks.find((each) => each.count);
    if (!track) return;
    const i = selected ? selected.i + by : 0;
    if (i >= 0 && i < track.count) select({ track, i }, { inChart: true });
  }

  // --- the program ---

  function list() {
    rows = { program: [], row: [], first: new Map() };
    for (const number of view.programs) {
      rows.first.set(number, rows.row.length);
      const count = data.programs[number].rows.length;
      for (let row = -1; row < count; row++) {
        rows.program.push(number);
        rows.row.push(row);
      }
    }
    byId("program").innerHTML = view.programs
      .map((number) => `<option value="${number}">${escaped(data.programs[number].name)}</option>`)
      .join("");
    byId("rows").style.height = `${rows.row.length * LINE}px`;
    marked = [0, -1];
    listing.scrollTop = 0;
    paintRows();
  }

  function rowText(index) {
    const program = data.programs[rows.program[index]], row = rows.row[index];
    if (row < 0) return `; ${program.name}`;
    const line = program.quoted[row] ? text(program.quoted[row]) : "";
    const note = [program.notes[row], line].filter(Boolean).join("; ");
    return note ? `${program.rows[row]}  ; ${note}` : program.rows[row];
  }

  function paintRows() {
    const first = Math.max(Math.floor(listing.scrollTop / LINE) - 5, 0);
    const last = Math.min(first + Math.ceil(listing.clientHeight / LINE) + 10, rows.row.length);
    const found = new Set(foundRows);
    const parts = [];
    for (let index = first; index < last; index++) {
      const [code, ...note] = rowText(index).split("  ; ");
      const classes = ["row"];
      if (rows.row[index] < 0) classes.push("head");
      if (index >= marked[0] && index <= marked[1]) classes.push("marked");
      if (found.has(index)) classes.push("found");
      const comment = note.length ? `<i>  ; ${escaped(note.join("  ; "))}</i>` : "";
      const shown = code.length > MOST_LETTERS ? `${code.slice(0, MOST_LETTERS)} …` : code;
      const whole = shown === code ? "" : ` title="${escaped(code)}"`;
      parts.push(`<div class="${classes.join(" ")}" role="option" data-row="${index}"${whole} style="top:${index * LINE}px">${escaped(shown)}${comment}</div>`);
    }
    byId("rows").innerHTML = parts.join("");
    let current = 0;
    for (const [number, start] of rows.first) if (start <= listing.scrollTop / LINE + 3) current = number;
    if (rows.first.size) byId("program").value = String(marked[1] >= 0 ? rows.program[marked[1]] : current);
  }

  /** Mark the call at that pc of a program with what loads its operands; scroll there if asked. */
  function mark(number, pc, scrolls) {
    const program = data.programs[number], first = rows.first.get(number);
    if (first === undefined || !(pc in program.at)) return;
    const before = lowerBound(program.calls, pc) - 1;
    const start = before < 0 ? 0 : Math.min(program.calls[before] + 1, pc);
    marked = [first + 1 + program.at[start], first + 1 + program.at[pc]];
    if (scrolls) {
      const middle = (marked[1] + 1) * LINE - listing.clientHeight / 2;
      const seen = marked[0] * LINE >= listing.scrollTop && (marked[1] + 1) * LINE <= listing.scrollTop + listing.clientHeight;
      if (!seen) listing.scrollTop = Math.min(middle, marked[0] * LINE);
    }
    paintRows();
  }

  /** Select what the call makes that a row belongs to; clicked again, the next of these. */
  function chooseRow(index) {
    const number = rows.program[index], program = data.programs[number], row = rows.row[index];
    const pc = lowerBound(program.at, Math.max(row, 0));
    const call = program.calls[lowerBound(program.calls, pc)];
    const inMain = row >= program.at[0] - 1 && row <= program.at[program.at.length - 1];
    if (row < 0 || call === undefined || !inMain) return;
    const made = links.get(`${number} ${call}`) ?? [];
    const now = made.findIndex((each) => each.track === selected?.track && each.i === selected?.i);
    if (made.length) select(made[(now + 1) % made.length], { inListing: false, inChart: true });
    else select(null, { inListing: false });
    mark(number, call, false);
  }

  // --- searching ---

  function search() {
    terms = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    matches = [];
    foundRows = [];
    match = -1;
    if (terms.length) {
      const has = (hay) => terms.every((term) => hay.includes(term));
      for (const track of tracks) {
        track.hay ??= Array.from({ length: track.count }, (_, i) => hayOf(track, i));
        track.matched = Uint8Array.from(track.hay, (hay) => (has(hay) ? 1 : 0));
        for (let i = 0; i < track.count; i++) if (track.matched[i]) matches.push({ track, i });
      }
      for (let index = 0; index < rows.row.length; index++) if (has(rowText(index).toLowerCase())) foundRows.push(index);
    }
    tell();
    paintRows();
    draw();
    remember();
  }

  function hayOf(track, i) {
    const at = track.at, line = at.line[i];
    const parts = [text(at.name[i]), text(at.kind?.[i]), text(at.type?.[i]), text(at.about?.[i]), text(line), data.sources[line] ?? ""];
    return parts.join(" ").toLowerCase();
  }

  function tell() {
    const all = `${grouped(matches.length)} found`;
    const instructions = foundRows.length ? `, ${grouped(foundRows.length)} in programs` : "";
    const which = match < 0 ? all : `${grouped(match + 1)} of ${grouped(matches.length)}`;
    byId("found").textContent = terms.length ? which + instructions : "";
  }

  function nextMatch(by) {
    if (!matches.length) {
      if (foundRows.length) listing.scrollTop = foundRows[0] * LINE;
      return;
    }
    match = match < 0 ? (by > 0 ? 0 : matches.length - 1) : (match + by + matches.length) % matches.length;
    select(matches[match], { inChart: true });
    tell();
  }

  // --- the page ---

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "ink", "soft", "line", "grid", "accent", "bound"]) {
      ink[name] = style.getPropertyValue(`--${name}`).trim();
    }
    draw();
  }

  /** Keep in the address what is shown, so that it can be passed on. */
  function remember() {
    const kept = new URLSearchParams();
    if (data.views.indexOf(view) > 0) kept.set("view", data.views.indexOf(view));
    if (terms.length) kept.set("search", terms.join(" "));
    if (selected) kept.set("select", `${tracks.indexOf(selected.track)}.${selected.i}`);
    if (given.has("theme")) kept.set("theme", given.get("theme"));
    try {
      history.replaceState(null, "", `#${kept}`);
    } catch { /* where a page has no address */ }
  }

  function setOrder(wanted) {
    if (!view.clock || wanted === inOrder) return;
    inOrder = wanted;
    byId("order").textContent = inOrder ? "events" : "time";
    place();
    fit();
  }

  const given = new URLSearchParams(location.hash.slice(1));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(given.get("theme") ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => given.has("theme") || setTheme(dark.matches ? "dark" : "light"));
  byId("view").hidden = data.views.length < 2;
  byId("view").innerHTML = data.views
    .map((each, i) => `<option value="${i}">${escaped(each.name)}</option>`)
    .join("");
  byId("search").value = given.get("search") ?? "";
  const wantedView = Number(given.get("view"));
  show(wantedView in data.views ? wantedView : 0);
  layOut();
  new ResizeObserver(() => requestAnimationFrame(layOut)).observe(scroll);
  new ResizeObserver(() => requestAnimationFrame(paintRows)).observe(listing);
  const [whichTrack, whichItem] = (given.get("select") ?? "").split(".").map(Number);
  if (tracks[whichTrack] && whichItem >= 0 && whichItem < tracks[whichTrack].count && Number.isInteger(whichItem)) {
    select({ track: tracks[whichTrack], i: whichItem }, { inChart: true });
  }

  byId("view").addEventListener("change", (event) => { show(Number(event.target.value)); layOut(); });
  byId("details").addEventListener("click", (event) => {
    const button = event.target.closest("button[data-view]");
    if (!button) return;
    show(Number(button.dataset.view));
    layOut();
  });
  byId("program").addEventListener("change", (event) => {
    marked = [0, -1];
    listing.scrollTop = rows.first.get(Number(event.target.value)) * LINE;
    paintRows();
  });
  byId("order").addEventListener("click", () => setOrder(!inOrder));
  byId("in").addEventListener("click", () => zoom(0.6));
  byId("out").addEventListener("click", () => zoom(1 / 0.6));
  byId("fit").addEventListener("click", fit);
  byId("keys").addEventListener("click", () => byId("help").showModal());
  byId("theme").addEventListener("click", () => {
    given.set("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    setTheme(given.get("theme"));
    remember();
  });
  byId("legend").addEventListener("click", (event) => {
    const button = event.target.closest("button:not([disabled])");
    if (!button) return;
    byId("search").value = byId("search").value === button.textContent ? "" : button.textContent;
    search();
  });
  let waiting = 0;
  byId("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 120);
  });
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      if (waiting) { clearTimeout(waiting); waiting = 0; if (match < 0) search(); }
      nextMatch(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      event.target.value = "";
      search();
      canvas.focus();
    }
  });
  listing.addEventListener("scroll", paintRows);
  listing.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) chooseRow(Number(row.dataset.row));
  });
  listing.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    stepRow(by);
  });

  /** Choose the call before or after the marked one. */
  function stepRow(by) {
    const at = marked[1] < 0 ? 0 : by > 0 ? marked[1] + 1 : marked[0] - 1;
    for (let index = at; index >= 0 && index < rows.row.length; index += by) {
      const program = data.programs[rows.program[index]];
      if (rows.row[index] < 0 || !program.calls.some((pc) => program.at[pc] >= rows.row[index])) continue;
      chooseRow(index);
      listing.scrollTop = Math.min(Math.max(listing.scrollTop, (marked[1] + 2) * LINE - listing.clientHeight), marked[0] * LINE);
      paintRows();
      return;
    }
  }

  const pointers = new Map();
  let dragged = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.focus({ preventScroll: true, focusVisible: false });
    try { canvas.setPointerCapture(event.pointerId); } catch { /* of an event that no pointer made */ }
    pointers.set(event.pointerId, event);
    dragged = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return hover(event);
    const dx = event.offsetX - before.offsetX, dy = event.offsetY - before.offsetY;
    dragged += Math.abs(dx) + Math.abs(dy);
    if (dragged < CLICK) return undefined;
    tip.hidden = true;
    const other = [...pointers.values()].find((each) => each.pointerId !== event.pointerId);
    if (other) {
      const apart = (a) => Math.max(Math.abs(a.offsetX - other.offsetX), 10);
      zoom(apart(before) / apart(event), fromX(other.offsetX));
    } else {
      pan(-dx / (width - LEFT - RIGHT));
      const track = tracks.find((each) => {
        const top = each.y - scroll.scrollTop;
        return each.isPane && event.offsetY >= top && event.offsetY < top + each.height;
      });
      if (track && track.high - track.low < track.full) {
        const by = (dy / bodyHeight(track)) * (track.high - track.low);
        moveAddresses(track, track.low + by, track.high + by);
      } else scroll.scrollTop -= dy;
    }
    pointers.set(event.pointerId, event);
    return undefined;
  });
  const release = (event) => {
    if (pointers.delete(event.pointerId) && dragged < CLICK && event.type === "pointerup") {
      const title = titleAt(event.offsetY);
      if (title) toggle(title);
      else select(itemAt(event.offsetX, event.offsetY));
    }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", unhover);
  canvas.addEventListener("dblclick", (event) => {
    const item = itemAt(event.offsetX, event.offsetY);
    if (item) zoomTo(item);
    else zoom(0.5, fromX(event.offsetX));
  });
  canvas.addEventListener("wheel", (event) => {
    const track = tracks.find((each) => {
      const top = each.y - scroll.scrollTop;
      return each.isPane && event.offsetY >= top && event.offsetY < top + each.height;
    });
    const factor = Math.exp(event.deltaY * 0.002);
    if (event.altKey && track) {
      const at = fromY(track, event.offsetY);
      moveAddresses(track, at - (at - track.low) * factor, at + (track.high - at) * factor);
    } else if (event.ctrlKey || event.metaKey) zoom(factor, fromX(event.offsetX));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) / (width - LEFT - RIGHT));
    } else return;
    event.preventDefault();
  }, { passive: false });
  scroll.addEventListener("scroll", draw);

  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      a: () => pan(-0.2), ArrowLeft: () => pan(-0.2), d: () => pan(0.2), ArrowRight: () => pan(0.2),
      w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
      ArrowUp: () => { scroll.scrollTop -= 60; }, ArrowDown: () => { scroll.scrollTop += 60; },
      0: fit, f: () => (hovered ?? selected) && zoomTo(hovered ?? selected), t: () => setOrder(!inOrder),
      "[": () => step(-1), "]": () => step(1), "/": () => byId("search").focus(), "?": () => byId("help").showModal(),
      n: () => nextMatch(1), N: () => nextMatch(-1),
      Escape: () => { byId("search").value = ""; search(); select(null); },
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
})();
