// The grid of ranks: a line for each node; colour, shape and text say how each stands. Beyond some hundred on a canvas.

const RANK_STATES = {
  running: ["good", "●"], starting: ["busy", "◌"], replaying: ["busy", "▲"], repairing: ["busy", "◆"],
  lost: ["bad", "✕"], finished: ["idle", "■"], away: ["idle", "–"],
};
const MOST_BUTTONS = 256;
const cellOf = (count) => (count > 2048 ? 6 : 12); // pixels of a rank on the canvas
let ranksShown = ""; // the shape of what stands there
let pointedAt = 0;

/** In which line of the grid a rank stands: its node, or its group along the dimension that was chosen. */
function lineOf(rank, status) {
  const dimension = byId("rows").value, place = state.topology?.ranks[rank.rank];
  if (!dimension || !place) return status.nodes[rank.node] || `node ${rank.node}`;
  return dimension in place.coordinates ? `${dimension}${place.coordinates[dimension]}` : `no ${dimension}`;
}

/** Let the grid be ordered by any dimension of the topology. */
function offerDimensions() {
  const names = [...new Set((state.topology?.ranks ?? []).flatMap((rank) => Object.keys(rank.coordinates)))];
  if (byId("rows").options.length === names.length + 1) return;
  byId("rows").replaceChildren(make("option", { value: "", words: "node" }), ...names.map((name) => make("option", { value: name, words: `${name} group` })));
  byId("rows-part").hidden = !names.length;
}

function describeRank(rank, status) {
  const place = state.topology?.ranks[rank.rank];
  const groups = place ? Object.entries(place.coordinates).map(([name, at]) => `, ${name}${at}`).join("") : "";
  const loss = place ? `; its loss costs ${LOSS_WORDS[place.loss] ?? place.loss}` : "";
  const node = status.nodes.length ? `, node ${rank.node} (${status.nodes[rank.node]})` : "";
  const seen = rank.last_seen_s === null ? "" : `, last seen ${seconds(rank.last_seen_s)} ago`;
  const phase = rank.phase === null || rank.phase === rank.state ? "" : `, ${rank.phase}`;
  return `Rank ${rank.rank} (local ${rank.local_rank}${node}${groups}): ${rank.state}${phase}, step ${rank.step ?? "–"}, `
    + `pid ${rank.pid ?? "–"}, protection ${rank.protection}${status.state === "done" ? "" : seen}${loss}`;
}

function drawRanks(status) {
  const counts = {};
  for (const rank of status.ranks) counts[rank.state] = (counts[rank.state] ?? 0) + 1;
  const unprotected = status.ranks.filter((rank) => rank.protection !== "on").length;
  const legend = Object.entries(counts).map(([state, count]) => `${RANK_STATES[state]?.[1] ?? "?"} ${count} ${state}`);
  if (unprotected) legend.push(`┄ ${unprotected} not protected`);
  setText(byId("ranks-legend"), legend.join("   "));
  if (status.ranks.length > MOST_BUTTONS) drawRanksOnCanvas(status); else drawRanksAsButtons(status);
  pointedAt = Math.max(0, Math.min(pointedAt, status.ranks.length - 1));
  if (byId("rank").dataset.isAsked) setText(byId("rank"), describeRank(status.ranks[pointedAt], status));
  drawRanksTable(status);
}

function pointAtRank(index) {
  const status = state.status;
  if (!status || !status.ranks[index]) return;
  pointedAt = index;
  byId("rank").dataset.isAsked = "yes";
  setText(byId("rank"), describeRank(status.ranks[index], status));
}

/** Arrow keys, Home and End: the number of the rank to go to, null if it is another key. */
function rankByKey(key, count, perLine, from = pointedAt) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perLine, ArrowUp: -perLine };
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  return key in steps ? Math.max(0, Math.min(count - 1, from + steps[key])) : null;
}

function drawRanksAsButtons(status) {
  const host = byId("ranks");
  const shape = status.ranks.map((rank) => `${lineOf(rank, status)}:${rank.rank}`).join();
  if (shape !== ranksShown) {
    ranksShown = shape;
    const lines = new Map();
    status.ranks.forEach((rank, index) => {
      const cell = make("button", {
        type: "button", class: "cell", tabindex: index === pointedAt ? 0 : -1, "data-index": index,
        onpointerenter: () => pointAtRank(index),
        onfocus: () => pointAtRank(index),
        onkeydown: (event) => {
          const next = rankByKey(event.key, status.ranks.length, 8);
          if (next === null) return;
          event.preventDefault();
          const cells = host.querySelectorAll(".cell");
          cells[index].tabIndex = -1;
          cells[next].tabIndex = 0;
          cells[next].focus();
        },
      });
      const line = lineOf(rank, status);
      if (!lines.has(line)) lines.set(line, []);
      lines.get(line).push(cell);
    });
    host.replaceChildren(...[...lines].map(([line, cells]) => make("div", { class: "node" },
      make("span", { words: line }), make("div", { class: "cells" }, ...cells))));
  }
  host.querySelectorAll(".cell").forEach((cell) => {
    const rank = status.ranks[Number(cell.dataset.index)];
    const [colour, sign] = RANK_STATES[rank.state] ?? ["idle", "?"];
    const isOpen = rank.protection !== "on" && status.state !== "done";
    cell.className = `cell ${colour}${isOpen ? " unprotected" : ""}`;
    setText(cell, `${sign} ${rank.rank}`);
    const label = `rank ${rank.rank}: ${rank.state}${isOpen ? ", not protected" : ""}`;
    if (cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
  });
}

function drawRanksOnCanvas(status) {
  const host = byId("ranks");
  let canvas = host.querySelector("canvas");
  if (!canvas) {
    canvas = make("canvas", { tabindex: 0, role: "img" });
    const at = (event) => Math.floor(event.offsetY / canvas.cell) * canvas.perLine + Math.floor(event.offsetX / canvas.cell);
    canvas.addEventListener("pointermove", (event) => pointAtRank(canvas.order[at(event)]));
    canvas.addEventListener("keydown", (event) => {
      const next = rankByKey(event.key, canvas.order.length, canvas.perLine, canvas.order.indexOf(pointedAt));
      if (next !== null) { event.preventDefault(); pointAtRank(canvas.order[next]); drawRanksOnCanvas(state.status); }
    });
    host.replaceChildren(canvas);
    ranksShown = "canvas";
  }
  const cell = canvas.cell = cellOf(status.ranks.length), unit = cell / 12;
  const perLine = Math.max(8, Math.floor(host.clientWidth / cell / 8) * 8); // whole nodes of eight in a line
  const lines = Math.ceil(status.ranks.length / perLine), ratio = window.devicePixelRatio || 1;
  canvas.perLine = perLine;
  const place = (index) => state.topology?.ranks[status.ranks[index].rank]?.coordinates[byId("rows").value] ?? 0;
  canvas.order = [...status.ranks.keys()].sort((one, other) => place(one) - place(other) || one - other); // group by group
  if (canvas.width !== perLine * cell * ratio || canvas.height !== lines * cell * ratio) {
    canvas.width = perLine * cell * ratio;
    canvas.height = lines * cell * ratio;
    canvas.style.width = `${perLine * cell}px`;
    canvas.style.height = `${lines * cell}px`;
  }
  const pen = canvas.getContext("2d"), colours = {};
  for (const name of ["good", "busy", "bad", "idle"]) colours[name] = colourOf(name);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, perLine * cell, lines * cell);
  canvas.order.forEach((index, position) => {
    const rank = status.ranks[index];
    const x = (position % perLine) * cell, y = Math.floor(position / perLine) * cell;
    const colour = (RANK_STATES[rank.state] ?? ["idle"])[0];
    pen.fillStyle = colours[colour];
    if (colour === "good") pen.fillRect(x + 2 * unit, y + 2 * unit, 8 * unit, 8 * unit);
    else if (colour === "bad" && unit < 1) pen.fillRect(x, y, cell, cell);
    else if (colour === "bad") { pen.fillRect(x, y + 4 * unit, cell, 4 * unit); pen.fillRect(x + 4 * unit, y, 4 * unit, cell); }
    else { pen.beginPath(); pen.arc(x + cell / 2, y + cell / 2, cell / 2, 0, 7); pen.fill(); }
    if (index === pointedAt && byId("rank").dataset.isAsked) {
      pen.strokeStyle = colours[colour];
      pen.strokeRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
    }
  });
  canvas.setAttribute("aria-label", `${status.ranks.length} ranks: ${byId("ranks-legend").textContent}`);
}

/** A colour of the styles as a canvas takes it; found out once for each scheme. */
function colourOf(name) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const key = `${name} ${isDark}`;
  if (!(key in colourOf.known)) {
    const probe = document.body.appendChild(make("span", { class: name, hidden: true }));
    colourOf.known[key] = getComputedStyle(probe).color;
    probe.remove();
  }
  return colourOf.known[key];
}
colourOf.known = {};

function drawRanksTable(status) {
  const host = byId("ranks-table");
  if (!host.parentElement.open) return;
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, { words: String(cell ?? "–"), scope: tag === "th" ? "col" : null })));
  const head = row(["rank", "node", "pid", "state", "step", "phase", "last seen", "protection"], "th");
  const rows = status.ranks.slice(0, 1024).map((rank) => row([rank.rank, rank.node, rank.pid, rank.state, rank.step, rank.phase,
    seconds(rank.last_seen_s), rank.protection], "td"));
  host.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}
