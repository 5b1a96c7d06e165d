// Each incident: what it was, a waterfall of its phases and of what happened to its ranks, what was proved and what not.

const MARKS = { // event -> sign, what it says
  rank_exited: ["✕", "ended"], rank_faulted: ["✕", "fault"], rank_killed: ["✕", "killed"], rank_started: ["▶", "new process"],
  rank_replayed: ["◆", "replayed"], compared: ["✓", "compared"], mismatch_detail: ["!", "differs"], spawn_failed: ["!", "not started"],
};
const incidentsShown = new Map(); // id -> what its drawing was made of

/** What happened to single ranks meanwhile: [[rank, seconds since the loss, sign, text], ...]. */
function marksOf(one) {
  const began = state.opened.get(one.id);
  if (began === undefined) return [];
  const over = one.total_s ?? Infinity;
  return state.events.filter((event) => event.event in MARKS && event.rank !== undefined).map((event) => {
    const [sign, word] = MARKS[event.event];
    const what = event.event === "compared" ? `equal: ${event.equal.join("; ")}` : word;
    return [event.rank, unixOf(event.at) - began, sign, what, event];
  }).filter(([rank, at, , , event]) => (event.incident === one.id || (event.incident === undefined && at >= -0.05 && at <= over + 0.05))
    && (one.ranks.includes(rank) || event.incident === one.id));
}

const describeSpan = ([phase, start, end]) => `${phase} ${seconds(end - start)}`;

function drawWaterfall(one) {
  const spans = state.summary.spans[one.id] ?? [], marks = marksOf(one);
  const ranks = [...new Set(marks.map((mark) => mark[0]))].slice(0, 16);
  const from = Math.min(0, ...spans.map((span) => span[1]));
  const inside = marks.filter((mark) => mark[1] <= (one.total_s ?? Infinity) + 0.5 || one.total_s === null);
  const to = Math.max(one.total_s ?? 1, 0.001, ...spans.map((span) => span[2]), ...inside.map((mark) => mark[1]));
  const width = Math.max(280, Math.min(1100, byId("incidents").clientWidth || WIDE));
  const line = 20, left = 72, right = 60, height = (spans.length + ranks.length) * line + 18;
  const x = (at) => left + (width - left - right) * (Math.min(at, to) - from) / (to - from);
  const words = spans.map(describeSpan).join(", ");
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Phases of incident ${one.id}: ${words}` });
  spans.forEach(([phase, start, end], index) => {
    const y = index * line;
    svg.append(make("text", { x: left - 12, y: y + 14, "text-anchor": "end", words: phase }),
      make("rect", { class: `p-${phase}`, x: x(start), y: y + 4, width: Math.max(2, x(end) - x(start)), height: 12 }),
      make("text", { x: Math.max(x(end), x(start) + 2) + 5, y: y + 14, words: seconds(end - start) }));
  });
  ranks.forEach((rank, index) => {
    const y = (spans.length + index) * line;
    svg.append(make("text", { x: left - 12, y: y + 14, "text-anchor": "end", words: `rank ${rank}` }),
      make("line", { class: "grid", x1: left, x2: width - right, y1: y + 10, y2: y + 10 }));
    for (const [, at, sign, what] of inside.filter((mark) => mark[0] === rank)) {
      svg.append(make("text", { x: x(at), y: y + 14, "text-anchor": "middle", words: sign },
        make("title", { words: `${seconds(Math.max(0, at))}: ${what}` })));
    }
  });
  svg.append(make("text", { x: x(0), y: height - 3, "text-anchor": "middle", words: "0" }),
    make("text", { x: x(to), y: height - 3, "text-anchor": "middle", words: seconds(to) }));
  return make("div", { class: "waterfall" }, svg);
}

/** Stacks of all ranks of a node side by side, ranks that stand alike together. */
function drawGroups(event) {
  const columns = event.groups.map((group) => make("div", {},
    make("h3", { words: `Rank${group.ranks.length > 1 ? "s" : ""} ${group.ranks.slice(0, 16).join(", ")}${group.ranks.length > 16 ? ", ..." : ""}: ${group.place}` }),
    make("pre", { words: group.main || "no Python frame of the script" })));
  const records = event.flight_records.map((path) => make("p", { class: "note", words: `flight record: ${path}` }));
  return make("details", {}, make("summary", { words: `Where each rank was when rank ${event.because_of} hung` }),
    make("div", { class: "side-by-side" }, ...columns), ...records);
}

/** The command that takes the step again in which a rank has failed. Nothing is kept of a process that was killed. */
function drawAgain(one) {
  if (!one.ranks.length || one.boundary === null || one.kind.startsWith("signal")) return null;
  return make("p", { class: "note" }, document.createTextNode("Take this step again: "),
    make("code", { words: `ttprun replay ${state.status.run_id} --rank ${one.ranks[0]} --step ${one.boundary}` }),
    document.createTextNode(" (if the run keeps steps: --keep-steps)"));
}

function drawIncident(one) {
  const colour = { recovered: "good", open: "busy", restarted: "busy", failed: "bad" }[one.outcome] ?? "idle";
  const lost = one.steps_lost === null ? "" : `, ${one.steps_lost} steps lost`;
  const took = one.total_s === null ? "" : ` in ${seconds(one.total_s)}`;
  const how = one.rung === null ? "" : ` (${one.rung})`;
  const list = (title, items) => items.length ? make("div", {}, make("h3", { words: title }), make("ul", {}, ...items.map((item) => make("li", { words: item })))) : null;
  const stacks = state.events.filter((event) => (event.stack && one.ranks.includes(event.rank) || event.event === "stacks" && one.ranks.includes(event.because_of))
    && Math.abs(unixOf(event.at) - (state.opened.get(one.id) ?? 0)) < (one.total_s ?? 3600) + 60);
  return make("article", { class: "incident" },
    make("h3", {}, document.createTextNode(`#${one.id} ${one.kind}: `), make("span", { class: colour, words: `${one.outcome}${took}${lost}${how}` })),
    make("p", { class: "note", words: withKind(one.reason_kind, one.reason || "") }),
    drawWaterfall(one),
    list("Proved equal", one.equal), list("Not proved", one.not_proved), drawAgain(one),
    ...stacks.map((event) => event.event === "stacks" ? drawGroups(event)
      : make("details", {}, make("summary", { words: `Stack of rank ${event.rank}` }), make("pre", { words: event.stack }))));
}

function drawIncidents(status) {
  const host = byId("incidents");
  if (!status.incidents.length) return;
  const shown = status.incidents.slice(-50).reverse();
  const drawn = state.events.filter((event) => event.event in MARKS || event.stack || event.event === "stacks");
  const made = JSON.stringify([shown, host.clientWidth, drawn.length]); // the status may come before its events
  if (incidentsShown.get("made") === made) return; // what somebody has opened stays open
  incidentsShown.set("made", made);
  const more = status.incidents.length - shown.length;
  host.replaceChildren(...shown.map(drawIncident), more ? make("p", { class: "note", words: `and ${more} earlier ones` }) : "");
}
