// Curves over time, with incidents as marks, and the bar of where the time went. Drawn as SVG by hand.

const WIDE = 720, HIGH = 150, LEFT = 52, BOTTOM = 20, TOP = 8;

/**
 * Speed of training between each two points of the history: [[unix, steps per second, whether the curve breaks off
 * before it], ...]; at most some hundred of them. What an incident took is not counted, nor a time that is mostly one.
 */
function speeds(history, spans) {
  const points = history.filter(([, step]) => step > 0);
  const every = Math.max(1, Math.ceil(points.length / 400));
  const found = [];
  let isBroken = false;
  for (let index = every; index < points.length; index += every) {
    const [before, first] = points[index - every], [now, last] = points[index];
    const paused = spans.reduce((sum, [began, ended]) => sum + Math.max(0, Math.min(now, ended) - Math.max(before, began)), 0);
    const trained = now - before - paused;
    isBroken ||= paused > 0;
    if (last <= first || trained < 0.5 * (now - before)) continue; // too short a time to tell
    found.push([now, (last - first) / trained, isBroken]);
    isBroken = false;
  }
  return found;
}

/** When incidents went on: [[from, to, incident], ...] in Unix time. */
function incidentSpans() {
  return state.status.incidents.map((one) => {
    const began = state.opened.get(one.id);
    return began === undefined ? null : [began, began + (one.total_s ?? unixOf(state.status.updated_at) - began), one];
  }).filter((span) => span !== null);
}

function drawCharts() {
  const found = speeds(state.history, incidentSpans());
  const host = byId("charts");
  if (found.length < 2) {
    if (!host.childElementCount) host.append(make("p", { class: "note", words: "Known after some steps." }));
    return;
  }
  host.replaceChildren(
    drawCurve("Steps per second", found, (value) => figure(value)),
    drawCurve("Step time", found.map(([at, rate, isBroken]) => [at, 1 / rate, isBroken]), (value) => seconds(value)),
  );
}

function drawCurve(name, points, write) {
  const width = Math.max(280, Math.min(1100, byId("charts").clientWidth || WIDE));
  const from = points[0][0], to = Math.max(points[points.length - 1][0], from + 1);
  const most = Math.max(...points.map((point) => point[1])) * 1.08;
  const x = (at) => LEFT + (width - LEFT - 6) * (at - from) / (to - from);
  const y = (value) => TOP + (HIGH - TOP - BOTTOM) * (1 - value / most);
  const last = points[points.length - 1][1];
  const spans = incidentSpans().filter((span) => span[1] >= from && span[0] <= to);
  const label = `${name}: ${write(last)} now, at most ${write(most / 1.08)}; ${spans.length} incidents in this time`;
  const svg = make("svg", { viewBox: `0 0 ${width} ${HIGH}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const value = most / 1.08 * share;
    svg.append(make("line", { class: "grid", x1: LEFT, x2: width - 6, y1: y(value), y2: y(value) }),
      make("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", words: write(value) }));
  }
  for (const [began, ended, one] of spans) {
    const left = x(Math.max(from, began)), right = x(Math.min(to, ended));
    svg.append(make("rect", { class: "mark", x: left, y: TOP, width: Math.max(2, right - left), height: HIGH - TOP - BOTTOM },
      make("title", { words: `incident ${one.id}: ${one.reason}` })),
      make("text", { x: left + 3, y: TOP + 10, words: `#${one.id}` }));
  }
  const path = points.map(([at, value, isBroken], index) => `${index && !isBroken ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  svg.append(make("path", { class: "curve", d: path }),
    make("text", { x: LEFT, y: HIGH - 4, words: `${clock(from)} UTC` }),
    make("text", { x: width - 6, y: HIGH - 4, "text-anchor": "end", words: `${clock(to)} UTC` }));
  return make("figure", {}, make("figcaption", { words: `${name}: ${write(last)}` }), svg);
}

/** Ranks for which the others wait, now and in single steps. */
function drawStragglers(summary, status) {
  const late = state.events.filter((event) => event.event === "straggler").slice(-5).reverse();
  if (summary.usual_busy === null && !late.length) return;
  const share = (value) => `${Math.round(100 * value)} %`;
  const rows = summary.stragglers.map((rank) => {
    const busy = status.ranks.find((one) => one.rank === rank)?.busy;
    return make("li", { words: `Rank ${rank} holds up the others: it computes ${share(busy)} of the time, most ranks ${share(summary.usual_busy)}` });
  }).slice(0, 16);
  const steps = late.map((event) => make("li", { words: `Rank ${event.rank} held up step ${event.step} for ${seconds(event.took_s)} (usually ${seconds(event.usual_s)})` }));
  const none = summary.usual_busy === null || rows.length ? null
    : make("p", { class: "note", words: `No straggler: all ranks compute about ${share(summary.usual_busy)} of the time and wait for the rest.` });
  byId("stragglers").replaceChildren(...[none, rows.length || steps.length ? make("ul", {}, ...rows, ...steps) : null].filter((part) => part !== null));
}

const TIME_WORDS = {
  productive: "productive: steps done for the first time",
  ...REASONS,
  rest: "the current step",
};

function drawTime(summary, status) {
  if (!status.is_leading) {
    byId("time").replaceChildren(make("p", { class: "note", words: "Only the leading node knows this: see its page." }));
    return;
  }
  const spent = { productive: summary.productive_s, ...summary.lost_s };
  const known = Object.values(spent).reduce((sum, value) => sum + value, 0);
  const wall = Math.max(summary.wall_s, known);
  if (wall <= 0) return;
  spent.rest = Math.max(0, wall - known);
  const shown = Object.entries(spent).filter(([, value]) => value > 0.0005 * wall);
  const svg = make("svg", { viewBox: "0 0 1000 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  let left = 0;
  for (const [reason, value] of shown) {
    svg.append(make("rect", { class: `f-${reason}`, x: left, y: 0, width: 1000 * value / wall, height: 26 }));
    left += 1000 * value / wall;
  }
  const rows = shown.map(([reason, value]) => make("tr", {},
    make("td", {}, make("svg", { class: "swatch", viewBox: "0 0 1 1", "aria-hidden": "true" }, make("rect", { class: `f-${reason}`, width: 1, height: 1 })),
      document.createTextNode(TIME_WORDS[reason] ?? reason)),
    make("td", { class: "number", words: seconds(value) }),
    make("td", { class: "number", words: `${(100 * value / wall).toFixed(1)} %` })));
  const head = make("tr", {}, ...["what", "time", "share"].map((word, index) => make("th", { scope: "col", class: index ? "number" : null, words: word })));
  byId("time").replaceChildren(svg, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}
