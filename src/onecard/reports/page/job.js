"use strict";
(() => {
  const data = JSON.parse(document.getElementById("job").textContent);
  const { job, timeline, memory, words, colours } = data;
  const $ = (id) => document.getElementById(id);
  const make = (tag, props = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(props)) {
      if (key === "text") node.textContent = value;
      else if (key in node && key !== "role" && key !== "style") node[key] = value;
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  };

  // -- numbers in words --------------------------------------------------------------------------------------------
  const count = (n, digits = 0) => n.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const seconds = (s) => {
    if (Math.abs(s) >= 1) return `${count(s, 3)} s`;
    if (Math.abs(s) >= 1e-3 || s === 0) return `${count(s * 1e3, s === 0 ? 0 : 2)} ms`;
    return `${count(s * 1e6, 1)} \u00b5s`;
  };
  const bytes = (n) => {
    if (n >= 2 ** 27) return `${count(n / 2 ** 30, 2)} GiB`;
    if (n >= 2 ** 17) return `${count(n / 2 ** 20, 2)} MiB`;
    return n >= 1024 ? `${count(n / 1024, 1)} KiB` : `${count(n)} B`;
  };
  const share = (part, whole) => `${count(whole ? (100 * part) / whole : 0, 1)} %`;
  const plural = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
  const named = (name) => name.replace("messages along '", "messages ").replace("sent along '", "sent ").replace("'", "");

  // -- head --------------------------------------------------------------------------------------------------------
  $("subtitle").textContent = words.subtitle;
  const capacity = job.machine.capacity;
  const verdict = $("verdict");
  const fullest = job.ranks.reduce((a, b) => (b.peak > a.peak ? b : a));
  if (capacity) {
    const margin = job.fits ? `${bytes(capacity - job.peak)} are left` : `${bytes(job.peak - capacity)} too much`;
    verdict.textContent = `${job.fits ? "Fits" : "Does not fit"}: the fullest rank (${fullest.name}) needs ${bytes(job.peak)} of ${bytes(capacity)}; ${margin}.`;
    verdict.classList.add(job.fits ? "fits" : "full");
  } else verdict.textContent = `The fullest rank (${fullest.name}) needs ${bytes(job.peak)}.`;
  for (const [name, value, shown] of [
    ["Step", job.seconds, seconds(job.seconds)],
    [words.tokens, job.tokens_per_second, count(job.tokens_per_second)],
    ["MFU, of the peak", job.mfu, share(job.mfu, 1)],
    ["HFU, of the peak", job.hfu, share(job.hfu, 1)],
    ["Peak memory", job.peak, bytes(job.peak)],
  ]) {
    const figure = make("dd", { text: shown });
    figure.dataset.value = value;
    $("figures").append(make("div", {}, make("dt", { text: name }), figure));
  }

  // -- theme -------------------------------------------------------------------------------------------------------
  const root = document.documentElement;
  const media = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (media.matches ? "dark" : "light")) === "dark";
  const paint = [];
  const repaint = () => {
    $("theme").textContent = isDark() ? "Light" : "Dark";
    $("theme").setAttribute("aria-label", `Change to ${isDark() ? "light" : "dark"} colours`);
    paint.forEach((draw) => draw());
  };
  $("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; repaint(); });
  media.addEventListener("change", repaint);
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // -- a tip beside the pointer or the focus -----------------------------------------------------------------------
  const tip = $("tip");
  const showTip = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  const tips = (node, text) => {
    node.addEventListener("pointermove", (e) => showTip(text, e.clientX, e.clientY));
    node.addEventListener("pointerleave", hideTip);
    node.addEventListener("focus", () => { const b = node.getBoundingClientRect(); showTip(text, b.left + 60, b.bottom - 14); });
    node.addEventListener("blur", hideTip);
  };
  addEventListener("keydown", (e) => { if (e.key === "Escape") hideTip(); });

  // -- stacked bars ------------------------------------------------------------------------------------------------
  const colourOf = (name) => colours[name] || colours[name.split(" ")[0]] || "#999999";
  const legend = (list, names) => {
    list.replaceChildren(...names.map((name) => make("li", {}, make("span", { className: "key", style: `background:${colourOf(name)}`, "aria-hidden": "true" }), named(name))));
  };
  const stack = (head, parts, whole, sum, shown) => {
    const bar = make("div", { className: "stack", "aria-hidden": "true" });
    for (const [name, value] of parts) if (value > 0) bar.append(make("i", { style: `width:${(100 * value) / whole}%;background:${colourOf(name)}` }));
    const text = parts.filter(([, value]) => value).map(([name, value]) => `${named(name)}: ${shown(value)} (${share(value, sum)})`);
    const row = make("div", { className: "row", tabIndex: 0 }, make("span", { text: head, "aria-hidden": "true" }), bar, make("span", { className: "sum", text: shown(sum), "aria-hidden": "true" }));
    row.setAttribute("role", "listitem");
    row.setAttribute("aria-label", `${head}, ${shown(sum)}. ${text.join(", ")}`);
    tips(row, [`${head}: ${shown(sum)}`, ...text].join("\n"));
    return row;
  };
  const all = (field) => [...new Set(job.ranks.flatMap((rank) => Object.keys(rank[field])))];
  const terms = all("terms");
  const some = (n, most) => (n <= most ? [...Array(n).keys()] : [...new Set([...Array(most).keys()].map((i) => Math.floor((i * (n - 1)) / (most - 1))))]);
  const drawTerms = (places) => $("terms").replaceChildren(...places.map((i) => {
    const rank = job.ranks[i];
    return stack(rank.name, terms.map((name) => [name, rank.terms[name] || 0]), job.seconds, Object.values(rank.terms).reduce((a, b) => a + b, 0), seconds);
  }));
  legend($("terms-legend"), terms.filter((name) => job.ranks.some((rank) => rank.terms[name])));
  const few = some(job.ranks.length, 16);
  drawTerms(few);
  if (few.length < job.ranks.length) {
    const button = $("terms-all");
    button.hidden = false;
    button.textContent = `Show all ${job.ranks.length} kinds of ranks`;
    button.addEventListener("click", () => { drawTerms(job.ranks.map((_, i) => i)); button.hidden = true; $("terms").firstChild.focus(); });
  }

  // -- canvases ----------------------------------------------------------------------------------------------------
  const prepared = (canvas, height) => {
    const width = canvas.parentNode.clientWidth, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    return [pen, width];
  };
  const step = (span, most) => {
    const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  };
  const axis = (pen, from, to, left, right, bottom, height) => {
    const unit = to - from >= 2e9 ? [1e9, "s"] : to - from >= 2e6 ? [1e6, "ms"] : [1e3, "\u00b5s"];
    const each = step(to - from, Math.max(2, (right - left) / 90));
    pen.fillStyle = css("--soft");
    pen.strokeStyle = css("--grid");
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (let at = Math.ceil(from / each) * each; at <= to; at += each) {
      const x = left + ((at - from) / (to - from)) * (right - left);
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height); pen.stroke();
      const digits = Math.max(0, -Math.floor(Math.log10(each / unit[0]) + 1e-9));
      if (x > left - 1 && x < right - 12) pen.fillText(`${count(at / unit[0], digits)} ${unit[1]}`, Math.max(left + 14, x), bottom);
    }
  };
  const shaded = (colour, shade) => {
    const part = 0.55 ** shade, back = isDark() ? 16 : 255;
    const mix = [1, 3, 5].map((i) => Math.round(back + part * (parseInt(colour.slice(i, i + 2), 16) - back)));
    return `rgb(${mix.join(",")})`;
  };

  // -- timeline ----------------------------------------------------------------------------------------------------
  const rows = timeline.rows.map((flat) => {
    const n = flat.length / 5, row = { kind: new Uint8Array(n), stage: new Uint32Array(n), batch: new Int32Array(n), begin: new Float64Array(n), end: new Float64Array(n) };
    let now = 0;
    for (let i = 0; i < n; i++) {
      [row.kind[i], row.stage[i], row.batch[i]] = flat.slice(5 * i, 5 * i + 3);
      row.begin[i] = now += flat[5 * i + 3];
      row.end[i] = now += flat[5 * i + 4];
    }
    const stages = [...new Set(row.stage)].sort((a, b) => a - b);
    row.shade = new Map(stages.map((stage, i) => [stage, stages.length > 3 ? 0 : i]));
    return row;
  });
  const length = job.seconds * 1e9;
  const view = { from: 0, to: length, row: 0, at: -1 };
  const chart = $("timeline");
  const each = Math.max(7, Math.min(26, Math.floor(440 / Math.max(1, rows.length))));
  const gutter = () => (chart.parentNode.clientWidth < 500 ? 40 : 56);
  const firstIn = (row, time) => {
    let low = 0, high = row.end.length;
    while (low < high) { const middle = (low + high) >> 1; if (row.end[middle] > time) high = middle; else low = middle + 1; }
    return low;
  };
  const said = (r, i) => {
    const row = rows[r], batch = row.batch[i] < 0 ? "" : ` of microbatch ${row.batch[i]}`;
    const stage = job.plan.pp > 1 ? `, stage ${row.stage[i]}` : "";
    return `pp ${timeline.ranks[r]}: ${timeline.kinds[row.kind[i]]}${batch}${stage}, ${seconds((row.end[i] - row.begin[i]) / 1e9)}, from ${seconds(row.begin[i] / 1e9)} to ${seconds(row.end[i] / 1e9)}`;
  };
  let binned = false;
  const drawTimeline = () => {
    const height = rows.length * each + 24;
    const [pen, width] = prepared(chart, height), left = gutter(), wide = width - left, scale = wide / (view.to - view.from);
    axis(pen, view.from, view.to, left, width, height - 18, height - 22);
    binned = false;
    pen.textBaseline = "middle";
    const every = Math.ceil(13 / each);
    rows.forEach((row, r) => {
      const top = r * each + 1, tall = each - 2;
      if (r % every === 0) { pen.fillStyle = css("--soft"); pen.textAlign = "right"; pen.fillText(`pp ${timeline.ranks[r]}`, left - 8, top + tall / 2); }
      const first = firstIn(row, view.from), last = firstIn(row, view.to);
      if (last - first > wide / 3) { binned = true; drawBinned(pen, row, first, last, left, wide, scale, top, tall); }
      else drawEvents(pen, row, first, Math.min(last + 1, row.end.length), left, width, scale, top, tall);
    });
    if (view.at >= 0) {
      const row = rows[view.row], x = left + (row.begin[view.at] - view.from) * scale, w = Math.max(2, (row.end[view.at] - row.begin[view.at]) * scale);
      pen.strokeStyle = css("--ink"); pen.lineWidth = 2;
      pen.strokeRect(Math.max(left, x), view.row * each + 1, Math.min(w, width - Math.max(left, x)), each - 2);
      pen.lineWidth = 1;
    }
    const what = timeline.left_out ? ` ${count(timeline.left_out)} of ${count(timeline.events)} events are left out: ${rows.length} of ${timeline.of} kinds of ranks are shown.` : "";
    const bins = binned ? " There are more events than room: each column shows the shares of what runs then. Zoom in to see them one by one." : "";
    $("timeline-note").textContent = `${words.schedule}. One rank of each kind; what is empty is waiting, and after the last event come sums, the optimizer and gathers.${what}${bins}`;
    chart.setAttribute("aria-label", `Timeline of ${plural(rows.length, "kind")} of ranks, ${plural(timeline.events, "event")}, from ${seconds(view.from / 1e9)} to ${seconds(view.to / 1e9)}`);
  };
  const drawEvents = (pen, row, first, last, left, width, scale, top, tall) => {
    pen.strokeStyle = css("--edge");
    pen.textAlign = "center";
    let longest = 0;
    for (let i = first; i < last; i++) longest = Math.max(longest, String(row.batch[i]).length);
    for (let i = first; i < last; i++) {
      const x = Math.max(left, left + (row.begin[i] - view.from) * scale), end = Math.min(width, left + (row.end[i] - view.from) * scale);
      if (end <= x) continue;
      pen.fillStyle = shaded(colourOf(timeline.kinds[row.kind[i]]), row.shade.get(row.stage[i]));
      pen.fillRect(x, top, end - x, tall);
      if (end - x > 3) pen.strokeRect(x + 0.5, top + 0.5, end - x - 1, tall - 1);
      if (end - x > 7 * (0.6 + longest) && tall >= 13 && row.batch[i] >= 0) {
        pen.fillStyle = row.shade.get(row.stage[i]) && isDark() ? "#f4f6f8" : "#10161d";
        pen.fillText(row.batch[i], (x + end) / 2, top + tall / 2 + 0.5);
      }
    }
  };
  const drawBinned = (pen, row, first, last, left, wide, scale, top, tall) => {
    const columns = Math.ceil(wide), kinds = timeline.kinds.length, busy = new Float32Array(columns * kinds);
    for (let i = first; i < Math.min(last + 1, row.end.length); i++) {
      let at = Math.max(0, (row.begin[i] - view.from) * scale);
      const end = Math.min(columns, (row.end[i] - view.from) * scale);
      while (at < end) { const next = Math.min(end, Math.floor(at) + 1); busy[Math.floor(at) * kinds + row.kind[i]] += next - at; at = next; }
    }
    for (let k = 0; k < kinds; k++) {
      pen.fillStyle = colourOf(timeline.kinds[k]);
      for (let x = 0; x < columns; x++) {
        let below = 0;
        for (let j = 0; j < k; j++) below += busy[x * kinds + j];
        const part = busy[x * kinds + k];
        if (part > 0) pen.fillRect(left + x, top + tall * (1 - Math.min(1, below + part)), 1, tall * part);
      }
    }
  };
  const look = (from, to) => {
    const span = Math.min(length, Math.max(length / 1e6, to - from));
    view.from = Math.max(0, Math.min(from, length - span));
    view.to = view.from + span;
    drawTimeline();
  };
  const zoom = (by, middle = (view.from + view.to) / 2) => look(middle - (middle - view.from) * by, middle + (view.to - middle) * by);
  const pan = (part) => look(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));
  const select = (r, i) => {
    view.row = r;
    view.at = i;
    const row = rows[r], span = view.to - view.from;
    if (row.begin[i] < view.from || row.end[i] > view.to) {
      const middle = (row.begin[i] + row.end[i]) / 2, wide = Math.max(span, 1.2 * (row.end[i] - row.begin[i]));
      look(middle - wide / 2, middle + wide / 2);
    } else drawTimeline();
    $("timeline-said").textContent = said(r, i);
  };
  const moves = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => look(0, length), PageUp: () => pan(-0.8), PageDown: () => pan(0.8),
    ArrowRight: () => select(view.row, Math.min(rows[view.row].end.length - 1, view.at + 1)),
    ArrowLeft: () => select(view.row, Math.max(0, view.at - 1)),
    Home: () => select(view.row, 0), End: () => select(view.row, rows[view.row].end.length - 1),
    ArrowDown: () => other(1), ArrowUp: () => other(-1),
  };
  const other = (by) => {
    const r = Math.max(0, Math.min(rows.length - 1, view.row + by)), now = view.at < 0 ? view.from : rows[view.row].begin[view.at];
    select(r, Math.min(rows[r].end.length - 1, firstIn(rows[r], now)));
  };
  if (rows.length) {
    chart.addEventListener("keydown", (e) => {
      if (!(e.key in moves) || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      moves[e.key]();
    });
    const at = (e) => { const box = chart.getBoundingClientRect(), left = gutter(); return [view.from + ((e.clientX - box.left - left) / (box.width - left)) * (view.to - view.from), Math.floor((e.clientY - box.top) / each)]; };
    let drag = null;
    chart.addEventListener("pointerdown", (e) => { drag = { x: e.clientX, from: view.from, to: view.to }; chart.setPointerCapture(e.pointerId); });
    chart.addEventListener("pointerup", () => { drag = null; });
    chart.addEventListener("pointercancel", () => { drag = null; });
    chart.addEventListener("pointermove", (e) => {
      if (drag && e.buttons) {
        const by = ((drag.x - e.clientX) / (chart.clientWidth - gutter())) * (drag.to - drag.from);
        hideTip();
        return look(drag.from + by, drag.to + by);
      }
      const [time, r] = at(e), row = rows[r], i = row ? firstIn(row, time) : 0;
      if (row && i < row.end.length && row.begin[i] <= time) showTip(said(r, i), e.clientX, e.clientY);
      else hideTip();
    });
    chart.addEventListener("pointerleave", hideTip);
    chart.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      zoom(e.deltaY > 0 ? 1.25 : 0.8, at(e)[0]);
    }, { passive: false });
    $("zoom-in").addEventListener("click", () => zoom(0.5));
    $("zoom-out").addEventListener("click", () => zoom(2));
    $("pan-left").addEventListener("click", () => pan(-0.5));
    $("pan-right").addEventListener("click", () => pan(0.5));
    $("fit").addEventListener("click", () => look(0, length));
    legend($("timeline-legend"), timeline.kinds);
    paint.push(drawTimeline);
  } else {
    $("timeline-note").textContent = "Nothing is recorded over time.";
    document.querySelectorAll("#timeline, #timeline-keys, .buttons").forEach((node) => node.remove());
  }

  // -- memory over time --------------------------------------------------------------------------------------------
  const curves = memory.rows.map((flat) => {
    let now = 0;
    return flat.reduce((found, value, i) => { if (i % 2 === 0) now += value; else found.push([now, value]); return found; }, []);
  });
  const graph = $("memory"), chooser = $("rank"), moment = $("moment");
  job.ranks.forEach((rank, i) => chooser.append(make("option", { value: i, text: `${rank.name} (${plural(rank.ranks, "rank")}), peak ${bytes(rank.peak)}` })));
  chooser.value = job.ranks.indexOf(fullest);
  const most = Math.max(capacity || 0, job.peak) * 1.06;
  const peakOf = (i) => curves[i].reduce((a, b) => (b[1] > a[1] ? b : a), [0, 0]);
  let here = 0;
  const drawMemory = () => {
    const height = 240, [pen, width] = prepared(graph, height), left = 62, chosen = Number(chooser.value), floor = height - 24;
    const x = (time) => left + (time / length) * (width - left - 2), y = (n) => floor - (n / most) * (floor - 8);
    axis(pen, 0, length, left, width, height - 18, floor);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const each = 2 ** 30 * step(most / 2 ** 30, 5);
    for (let at = 0; at < most; at += each) {
      pen.strokeStyle = css("--grid");
      pen.beginPath(); pen.moveTo(left, y(at)); pen.lineTo(width, y(at)); pen.stroke();
      pen.fillStyle = css("--soft");
      pen.fillText(each >= 2 ** 30 ? `${count(at / 2 ** 30)} GiB` : bytes(at), left - 8, y(at));
    }
    if (capacity) {
      pen.setLineDash([6, 4]); pen.strokeStyle = css("--bad");
      pen.beginPath(); pen.moveTo(left, y(capacity)); pen.lineTo(width, y(capacity)); pen.stroke();
      pen.setLineDash([]);
    }
    const line = (i) => { pen.beginPath(); curves[i].forEach(([time, n], k) => (k ? pen.lineTo(x(time), y(n)) : pen.moveTo(x(time), y(n)))); pen.stroke(); };
    pen.strokeStyle = css("--mute"); pen.globalAlpha = 0.55;
    some(curves.length, 24).forEach((i) => i !== chosen && line(i));
    pen.globalAlpha = 1; pen.strokeStyle = css("--accent"); pen.lineWidth = 2;
    line(chosen);
    const [time, top] = peakOf(chosen);
    pen.fillStyle = css("--accent");
    pen.beginPath(); pen.arc(x(time), y(top), 4.5, 0, 7); pen.fill();
    pen.lineWidth = 1;
    if (capacity) {
      const text = `${job.machine.name || "a rank"} has ${bytes(capacity)}`, at = y(capacity) < 18 ? y(capacity) + 12 : y(capacity) - 10;
      pen.fillStyle = css("--paper"); pen.fillRect(width - pen.measureText(text).width - 8, at - 8, width, 16);
      pen.fillStyle = css("--bad"); pen.fillText(text, width - 4, at);
    }
    pen.strokeStyle = css("--ink");
    pen.beginPath(); pen.moveTo(x(here), 4); pen.lineTo(x(here), floor); pen.stroke();
    graph.setAttribute("aria-label", `Memory of ${job.ranks[chosen].name} over the step: highest ${bytes(job.ranks[chosen].peak)} at ${seconds(time / 1e9)}`);
  };
  const bytesAt = (curve, time) => {
    const next = curve.findIndex(([at]) => at >= time);
    if (next >= 0 && curve[next][0] === time) return Math.max(...curve.filter(([at]) => at === time).map(([, n]) => n));
    if (next <= 0) return (curve[next < 0 ? curve.length - 1 : 0] || [0, 0])[1];
    const [a, m] = curve[next - 1], [b, n] = curve[next];
    return b > a ? m + ((n - m) * (time - a)) / (b - a) : n;
  };
  const lookAt = (time) => {
    here = Math.max(0, Math.min(length, time));
    const rank = job.ranks[chooser.value], text = `${rank.name} after ${seconds(here / 1e9)}: ${bytes(bytesAt(curves[chooser.value], here))}`;
    moment.value = Math.round((1000 * here) / length);
    moment.setAttribute("aria-valuetext", text);
    $("memory-said").textContent = text;
    drawMemory();
    return text;
  };
  const choose = () => {
    const rank = job.ranks[chooser.value], parts = Object.entries(rank.memory).filter(([, n]) => n > 0);
    $("peak-title").textContent = `Alive at the peak of ${rank.name}: ${bytes(rank.peak)}`;
    const bar = stack("", parts, rank.peak, rank.peak, bytes);
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `At the peak of ${rank.name}: ${parts.map(([name, n]) => `${name} ${bytes(n)}`).join(", ")}`);
    bar.style.gridTemplateColumns = "1fr";
    bar.firstChild.remove();
    bar.lastChild.remove();
    $("peak-bar").replaceChildren(bar);
    $("peak").replaceChildren(...parts.map(([name, n]) => {
      const value = make("dd", { text: bytes(n) });
      value.dataset.value = n;
      return make("div", {}, make("dt", {}, make("span", { className: "key", style: `background:${colourOf(name)}`, "aria-hidden": "true" }), name), value);
    }));
    lookAt(peakOf(Number(chooser.value))[0]);
  };
  if (curves.some((curve) => curve.length)) {
    const thinned = memory.left_out ? ` Of ${count(memory.points)} points those are drawn that are highest and lowest in their stretch of time.` : "";
    $("memory-note").textContent = `Bytes on a rank over the step; the line is the chosen kind of rank, others are grey, the dot its peak.${thinned}`;
    chooser.addEventListener("change", choose);
    moment.addEventListener("input", () => lookAt((moment.value / 1000) * length));
    graph.addEventListener("pointermove", (e) => { const box = graph.getBoundingClientRect(); showTip(lookAt(((e.clientX - box.left - 62) / (box.width - 64)) * length), e.clientX, e.clientY); });
    graph.addEventListener("pointerleave", hideTip);
    paint.push(drawMemory);
    choose();
  }

  // -- tables ------------------------------------------------------------------------------------------------------
  const table = (caption, columns, entries) => {
    const body = make("tbody");
    const lines = entries.map((entry) => make("tr", {}, ...columns.map(([, value, shown], i) => {
      const cell = make(i ? "td" : "th", i ? {} : { scope: "row" });
      cell.textContent = shown ? shown(value(entry)) : value(entry);
      cell.dataset.value = value(entry);
      return cell;
    })));
    body.append(...lines);
    const heads = columns.map(([name, value], i) => {
      const button = make("button", { type: "button", text: name }), head = make("th", { scope: "col", "aria-sort": "none" }, button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((one) => one.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = lines.map((line, k) => [value(entries[k]), k, line]);
        const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
        order.sort((a, b) => (up ? 1 : -1) * compare(a[0], b[0]) || a[1] - b[1]);
        body.replaceChildren(...order.map(([, , line]) => line));
      });
      return head;
    });
    const made = make("table", {}, make("caption", { text: caption }), make("thead", {}, make("tr", {}, ...heads)), body);
    return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption }, made);
  };
  const rank = [["rank", (r) => r.name], ["ranks", (r) => r.ranks, count]];
  const blocks = (r) => r.pieces.reduce((sum, [, n]) => sum + n, 0);
  $("tables").append(
    table("Seconds of a step", [...rank, ...terms.map((name) => [named(name), (r) => r.terms[name] || 0, seconds])], job.ranks),
    table("Memory at the peak", [...rank, ...all("memory").map((name) => [name, (r) => r.memory[name] || 0, bytes]), ["peak", (r) => r.peak, bytes]], job.ranks),
    table("What a rank holds and sends", [...rank, ["pieces", blocks, count], ["multiply-adds", (r) => r.macs, (n) => n.toExponential(3)], ...all("sent").map((name) => [`sent ${name}`, (r) => r.sent[name] || 0, bytes])], job.ranks),
    table("Pieces of the model, for one microbatch", [
      ["piece", (p) => p.name], ["alike", (p) => p.alike, count], ["forward", (p) => p.forward, seconds], ["backward", (p) => p.backward_input + p.backward_weight, seconds],
      ["of it messages", (p) => Object.values(p.messages).reduce((a, b) => a + b, 0), seconds], ["kept for backward", (p) => p.kept, bytes], ["parameters", (p) => p.tensors.reduce((a, b) => a + b, 0), count],
    ], job.pieces),
  );

  // -- plan and machine --------------------------------------------------------------------------------------------
  for (const part of ["plan", "machine"]) {
    $(`${part}-title`).textContent = words[part].title;
    for (const [name, text] of words[part].lines) $(part).append(make("dt", { text: name }), make("dd", { text }));
  }
  let wide = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== wide) { wide = document.body.clientWidth; repaint(); } }).observe(document.body);
  repaint();
})();
