// What the page knows, where it comes from (server-sent events, or the data of a report), and the text for an issue.

const state = { status: null, summary: null, topology: null, history: [], events: [], opened: new Map(), isOver: false };
const MOST_EVENTS = 5000;
const dirty = new Set();
let drawsAt = 0;

function takeStatus({ status, summary }) {
  const before = state.status;
  Object.assign(state, { status, summary });
  if (!before || before.state !== status.state || before.incidents.length !== status.incidents.length) setText(byId("announced"), summary.sentence);
  dirty.add("status");
}

function takeEvent(event) {
  state.events.push(event);
  if (state.events.length > MOST_EVENTS) state.events.splice(0, state.events.length - MOST_EVENTS);
  if (event.event === "incident" && !state.opened.has(event.id)) {
    state.opened.set(event.id, unixOf(event.at) - Math.max(0, event.at_s - event.opened_at_s));
  }
  dirty.add("events");
}

/** Draw once for all that has come, and not more often than a screen shows it. */
function draw() {
  if (drawsAt) return;
  drawsAt = requestAnimationFrame(() => {
    drawsAt = 0;
    const { status, summary } = state;
    if (!status) return;
    drawHead(status, summary);
    if (dirty.has("status")) { drawRanks(status); drawTime(summary, status); drawProved(status); drawSaved(status); }
    if (dirty.has("history") || dirty.has("size")) drawCharts();
    if (dirty.has("topology")) { drawTopology(state.topology); offerDimensions(); }
    drawIncidents(status);
    drawStragglers(summary, status);
    if (dirty.has("events")) drawEvents();
    dirty.clear();
  });
}

function drawHead(status, summary) {
  setText(byId("run"), `${status.run_id}${status.nodes.length ? ` · node ${status.node}` : ""}`);
  setText(byId("sentence"), summary.sentence);
  byId("dot").className = `dot ${status.state}`;
  const title = `${status.state} · ${status.run_id} · ttprun`;
  if (document.title !== title) document.title = title;
  const goodput = summary.wall_s > 0 && status.is_leading ? `${(100 * summary.productive_s / summary.wall_s).toFixed(1)} %` : "–";
  const figures = [["state", status.state], ["step", status.ranks.length ? Math.max(...status.ranks.map((rank) => rank.step ?? 0)).toLocaleString("en") : "–"],
    ["steps/s", figure(summary.steps_per_s)], ["step time", summary.steps_per_s ? seconds(1 / summary.steps_per_s) : "–"],
    ["goodput", goodput], ["incidents", `${status.incidents.length}`],
    ["steps lost", `${status.incidents.reduce((sum, one) => sum + (one.steps_lost ?? 0), 0)}`], ["wall time", seconds(summary.wall_s)]];
  const host = byId("figures");
  if (host.childElementCount !== figures.length) {
    host.replaceChildren(...figures.map(([name]) => make("div", {}, make("dt", { words: name }), make("dd"))));
  }
  figures.forEach(([, value], index) => setText(host.children[index].lastChild, value));
}

/** The run in text, for an issue or a ticket. */
function asText() {
  const { status, summary } = state;
  const lines = [`ttprun run ${status.run_id}: ${summary.sentence}`, "",
    `* ranks: ${status.world_size}, nodes: ${Math.max(1, status.nodes.length)}, generation: ${status.generation}, restarts left: ${status.restarts_left}`,
    `* protection: ${status.protection}`,
    !status.is_leading ? "* time: known to the leading node only" : `* time: ${seconds(summary.wall_s)}, productive ${seconds(summary.productive_s)}, ${Object.entries(summary.lost_s).filter(([, value]) => value > 0).map(([reason, value]) => `${reason} ${seconds(value)}`).join(", ") || "nothing lost"}`];
  for (const rank of summary.stragglers) lines.push(`* rank ${rank} holds the others up`);
  for (const name of status.not_proved) lines.push(`* not proved: ${name}`);
  for (const one of status.incidents) {
    lines.push("", `incident ${one.id}: ${one.kind}, rank ${one.ranks.join(", ") || "–"}, ${one.rung ?? "–"}: ${one.outcome}; ${withKind(one.reason_kind, one.reason)}`,
      `  ${[...(summary.spans[one.id] ?? []).map(describeSpan), `total ${seconds(one.total_s)}`].join(", ")}; boundary ${one.boundary ?? "–"}, steps lost ${one.steps_lost ?? "–"}`);
    for (const what of one.equal) lines.push(`  equal: ${what}`);
    for (const what of one.not_proved) lines.push(`  not proved: ${what}`);
  }
  lines.push("", "last events:", "```", ...state.events.slice(-30).map((event) => `${event.at} ${event.event} ${eventText(event)}`.slice(0, 400)), "```");
  return lines.join("\n");
}

async function copyText() {
  if (!state.status) return;
  byId("text").value = asText();
  byId("text-dialog").showModal();
  byId("text").select();
  let isCopied = false;
  try {
    await navigator.clipboard.writeText(byId("text").value);
    isCopied = true;
  } catch { // not on HTTPS or this machine: the browser has no clipboard for us
    isCopied = document.execCommand("copy");
  }
  setText(byId("text-note"), isCopied ? "Copied." : "Select it and copy it.");
}

function follow() {
  const source = new EventSource("api/events");
  const on = (kind, take) => source.addEventListener(kind, (message) => { take(JSON.parse(message.data)); draw(); });
  on("status", takeStatus);
  on("topology", (topology) => { state.topology = topology; dirty.add("topology"); });
  on("history", (points) => {
    const last = state.history.length ? state.history[state.history.length - 1][0] : 0; // it begins anew after a reconnect
    state.history.push(...points.filter(([unix]) => unix > last));
    dirty.add("history");
  });
  on("event", takeEvent);
  on("end", () => {
    state.isOver = true;
    source.close();
    if (state.status.state === "done" || !pagesElsewhere().length) say("The run has ended; this is the last that was known.");
    else say("This launcher has ended; if the job goes on, it is shown by ", pagesElsewhere());
  });
  source.addEventListener("open", () => say(""));
  source.addEventListener("error", () => {
    if (state.isOver) return;
    if (pagesElsewhere().length) say("Not connected; trying again … If this node is lost, the job is shown by ", pagesElsewhere());
    else say("Not connected; trying again …");
  });
}

/** Where the job is shown if the agent of this node leads no more, the next one first: [[node, address], ...]. */
function pagesElsewhere() {
  return [...(state.status?.pages ?? []).entries()].filter(([node, page]) => page && node !== state.status.node);
}

function say(text, pages = []) {
  const links = pages.slice(0, 8).flatMap(([node, page], index) => [index ? ", or " : "", make("a", { href: page, words: `node ${node}` })]);
  byId("connection").replaceChildren(text, ...links);
  byId("connection").hidden = !text;
}

byId("copy").addEventListener("click", copyText);
byId("rows").addEventListener("change", () => { dirty.add("status"); draw(); });
byId("search").addEventListener("input", () => { dirty.add("events"); draw(); });
byId("ranks-table").parentElement.addEventListener("toggle", () => { dirty.add("status"); draw(); });
window.addEventListener("resize", () => { for (const part of ["size", "status"]) dirty.add(part); draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { dirty.add("status"); draw(); });

const inside = JSON.parse(byId("data").textContent);
if (inside === null) follow();
else {
  takeStatus(inside);
  inside.events.forEach(takeEvent);
  Object.assign(state, { topology: inside.topology, history: inside.history, isOver: true });
  for (const part of ["topology", "history", "events"]) dirty.add(part);
  if (inside.settings) { byId("settings-part").hidden = false; setText(byId("settings"), inside.settings); }
  say(inside.note);
  draw();
}
