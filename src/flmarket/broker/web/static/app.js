/* The little script of the web market: colour scheme, charts drawn from the tables beside them, copying, messages.
   Everything works without it except live updates; nothing is evaluated, nothing is fetched from elsewhere. */
(function () {
  "use strict";
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  /* ---- colour scheme ---- */
  const scheme = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  function showScheme() {
    for (const button of document.querySelectorAll("[data-toggle-theme]")) {
      const next = scheme() === "dark" ? "light" : "dark";
      button.setAttribute("aria-label", `Switch to ${next} colours`);
      const use = button.querySelector("use");
      use.setAttribute("href", use.getAttribute("href").replace(/#.*/, next === "dark" ? "#moon" : "#sun"));
    }
  }
  function setScheme(name) {
    root.dataset.theme = name;
    try { localStorage.setItem("flmarket-theme", name); } catch { /* then it holds for this page only */ }
    showScheme();
    redrawAll();
  }
  dark.addEventListener("change", () => { showScheme(); redrawAll(); });

  /* ---- charts: <figure data-chart> draws the table inside it ---- */
  const drawn = new Map();
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const plain = (value, decimals) => value.toLocaleString("en-GB", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  const short = (value) => Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-4)
    ? value.toExponential(0) : value.toLocaleString("en-GB", { maximumSignificantDigits: 4 });

  function readTable(figure) {
    const heads = [...figure.querySelectorAll("table thead th")];
    const columns = heads.map(() => []);
    for (const row of figure.querySelectorAll("table tbody tr")) {
      [...row.cells].forEach((cell, i) => {
        const raw = cell.dataset.value ?? cell.textContent.replace(/[,\s]/g, "");
        columns[i].push(raw === "" || raw === "–" ? null : Number(raw));
      });
    }
    return { heads, columns };
  }

  function seriesOf(head, chart) {
    const stroke = colour(head.dataset.colour || "blue");
    const series = { label: head.textContent.trim(), stroke, width: 2, points: { show: false }, spanGaps: true };
    if (head.dataset.draw === "bars") {
      Object.assign(series, { width: 0, fill: stroke, paths: uPlot.paths.bars({ size: [0.72, 28] }) });
    } else if (head.dataset.draw === "step") {
      Object.assign(series, { width: 1.5, paths: uPlot.paths.stepped({ align: 1 }) });
    } else if (head.dataset.draw === "dashed") {
      Object.assign(series, { width: 1.25, dash: [5, 4] });
    } else if (chart.fill) {
      series.fill = `${stroke}17`;
    }
    if (head.dataset.draw !== "bars" && chart.rows < 3) series.points = { show: true, size: 7, fill: stroke };
    return series;
  }

  function draw(figure) {
    const holder = figure.querySelector(".plot");
    if (!holder || typeof uPlot === "undefined") return;
    const { heads, columns } = readTable(figure);
    const old = drawn.get(figure);
    if (old) { old.plot.destroy(); old.seen.disconnect(); drawn.delete(figure); }
    if (!columns.length || !columns[0].length) { figure.classList.add("drawn"); return; }
    const options = figure.dataset;
    const read = figure.querySelector(".chart-read");
    const rest = read ? read.textContent : "";
    const [muted, rule, ink] = [colour("muted"), colour("rule"), colour("ink")];
    const font = `12px ${colour("fonts") || "sans-serif"}`;
    const mark = options.mark === undefined ? null : Number(options.mark);
    const log = options.scale === "log";
    const axis = {
      stroke: muted, font, ticks: { show: false }, gap: 6,
      values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))),
    };
    const bars = heads.some((head) => head.dataset.draw === "bars");
    const x = columns[0];
    const plot = new uPlot({
      width: Math.max(holder.clientWidth, 120), height: holder.clientHeight || 216,
      padding: [8, 12, 0, 0], legend: { show: false },
      cursor: { y: false, points: { size: 8 }, drag: { x: false, y: false } },
      scales: {
        x: { time: false, range: (_, low, high) => (bars || low === high ? [low - 0.6, high + 0.6] : [low, high]) },
        y: log ? { distr: 3 } : { range: (_, low, high) => {
          const floor = options.floor === undefined ? low : Math.min(low, Number(options.floor));
          const ceiling = options.ceiling === undefined ? high : Math.max(high, Number(options.ceiling));
          const room = (ceiling - floor || Math.abs(ceiling) || 1) * 0.06;
          return [options.floor === undefined ? floor - room : floor, ceiling + (options.ceiling === undefined ? room : 0)];
        } },
      },
      axes: [
        { ...axis, grid: { show: false }, incrs: options.whole === undefined ? undefined : [1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000], space: 44, size: 26 },
        { ...axis, grid: { stroke: rule, width: 1 }, size: 48, space: 34 },
      ],
      series: [{}, ...heads.slice(1).map((head) => seriesOf(head, { fill: options.fill !== undefined, rows: x.length }))],
      hooks: {
        setCursor: [(self) => {
          if (!read) return;
          const i = self.cursor.idx;
          if (i === null || i === undefined || self.cursor.left < 0) { read.textContent = rest; return; }
          const parts = heads.slice(1).map((head, k) => {
            const value = columns[k + 1][i];
            return value === null ? "" : `${head.dataset.short || head.textContent.trim()} ${plain(value, Number(head.dataset.decimals ?? 3))}`;
          });
          read.textContent = `${options.x || heads[0].textContent.trim()} ${short(x[i])}: ${parts.filter(Boolean).join(" · ")}`;
        }],
        draw: [(self) => {
          const context = self.ctx, ratio = uPlot.pxRatio || 1, box = self.bbox;
          if (mark !== null && mark >= self.scales.x.min && mark <= self.scales.x.max) {
            const at = Math.round(self.valToPos(mark, "x", true));
            context.save();
            context.strokeStyle = ink; context.lineWidth = 1.25 * ratio; context.setLineDash([3 * ratio, 3 * ratio]);
            context.beginPath(); context.moveTo(at, box.top); context.lineTo(at, box.top + box.height); context.stroke();
            context.restore();
          }
          if (options.end === undefined) return;
          const values = columns[1], last = values.length - 1;
          if (values[last] === null) return;
          context.save();
          context.fillStyle = colour(heads[1].dataset.colour || "blue");
          context.beginPath();
          context.arc(self.valToPos(x[last], "x", true), self.valToPos(values[last], "y", true), 4 * ratio, 0, 2 * Math.PI);
          context.fill();
          context.restore();
        }],
      },
    }, columns, holder);
    const seen = new ResizeObserver(() => {
      if (holder.clientWidth && Math.abs(holder.clientWidth - plot.width) > 1) plot.setSize({ width: holder.clientWidth, height: holder.clientHeight || 216 });
    });
    seen.observe(holder);
    drawn.set(figure, { plot, seen });
    figure.classList.add("drawn");
  }
  function drawAll(within) {
    for (const figure of drawn.keys()) if (!figure.isConnected) { drawn.get(figure).seen.disconnect(); drawn.get(figure).plot.destroy(); drawn.delete(figure); }
    const found = [...within.querySelectorAll("figure[data-chart]")];
    const around = within.closest && within.closest("figure[data-chart]");
    if (around) found.push(around);
    found.forEach(draw);
  }
  function redrawAll() { [...drawn.keys()].forEach(draw); }

  /* ---- times, which are served in UTC, as the reader's own clock has them ---- */
  const day = { day: "numeric", month: "short" }, minute = { hour: "2-digit", minute: "2-digit" };
  const times = Object.fromEntries(Object.entries({
    when: { ...day, year: "numeric", ...minute, timeZoneName: "short" },
    clock: { ...minute, second: "2-digit" },
    dated: { ...day, ...minute, second: "2-digit" },
  }).map(([name, parts]) => [name, new Intl.DateTimeFormat("en-GB", { ...parts, hourCycle: "h23" })]));
  function localTimes(within) {
    for (const time of within.querySelectorAll("time[data-time]")) {
      const at = new Date(time.dateTime);
      if (time.title) time.title = times.when.format(at);
      time.textContent = times[time.dataset.time].format(at);
      delete time.dataset.time;
    }
  }

  /* ---- messages, announced to screen readers as well ---- */
  function say(text, link, href) {
    const place = document.getElementById("toasts");
    if (!place) return;
    const toast = document.createElement("div");
    toast.className = "toast";
    toast.textContent = text;
    if (link) {
      const way = document.createElement("a");
      way.textContent = link; way.href = href;
      toast.append(way);
    }
    place.append(toast);
    if (!link) setTimeout(() => toast.remove(), 6000);
  }

  /* what is typed stays on the page: whoever signs in elsewhere can go on, and a form that is sent comes back filled in */
  function signIn() {
    if (document.querySelector(".toast a")) return;
    say("Your session has ended. ", "Sign in again", `/sign-in?next=${encodeURIComponent(location.pathname + location.search)}`);
  }

  document.addEventListener("click", (event) => {
    const toggle = event.target.closest("[data-toggle-theme]");
    if (toggle) { setScheme(scheme() === "dark" ? "light" : "dark"); return; }
    const fill = event.target.closest("button[data-fill]");
    if (fill) {
      const field = document.getElementById(fill.dataset.fill);
      field.value = fill.dataset.value;
      field.dispatchEvent(new Event("input", { bubbles: true }));
      return;
    }
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      const source = document.getElementById(copy.dataset.copy);
      navigator.clipboard?.writeText(source.value ?? source.textContent.trim()).then(() => say("Copied."), () => say("Copying was not allowed."));
      return;
    }
    for (const open of document.querySelectorAll(".account[open]")) if (!open.contains(event.target)) open.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const open of document.querySelectorAll(".account[open]")) { open.open = false; open.querySelector("summary").focus(); }
  });

  /* the terms of the task that is chosen */
  document.addEventListener("change", (event) => {
    if (event.target.id !== "task") return;
    const terms = document.querySelector("[data-terms]");
    if (terms) terms.href = `/market/${event.target.value}`;
    const accept = document.getElementById("accept");
    if (accept) accept.checked = false;
  });

  /* a file fills a field, which can be looked at before it is sent */
  document.addEventListener("change", (event) => {
    const into = event.target.dataset?.into && document.getElementById(event.target.dataset.into);
    const file = into && event.target.files[0];
    if (!file) return;
    if (file.size > 250 * 1024) { say("That file is larger than 250 KiB."); event.target.value = ""; return; }
    file.text().then((text) => { into.value = text; }, () => say("That file could not be read."));
  });

  /* a slider and a number field that mean the same thing */
  document.addEventListener("input", (event) => {
    const twin = event.target.dataset?.twin && document.getElementById(event.target.dataset.twin);
    if (twin && twin.value !== event.target.value) twin.value = event.target.value;
  });

  /* ---- htmx ---- */
  /* It reports a request that was overtaken by a newer one, or left behind with the page, as an error of its own in the
     console. Those are no errors, and those that are become messages below. */
  const told = new Set(["htmx:afterRequest", "htmx:sendAbort", "htmx:sendError", "htmx:responseError", "htmx:timeout", "htmx:sseError"]);
  htmx.logger = (_, name, detail) => { if (told.has(name)) delete detail.error; };
  const settled = (part) => { localTimes(part.parentElement || part); drawAll(part); };
  document.addEventListener("htmx:afterSettle", (event) => settled(event.detail.elt));
  document.addEventListener("htmx:sseMessage", (event) => settled(event.target));
  document.addEventListener("htmx:sendError", () => say("The market did not answer. Check your connection and try again."));
  document.addEventListener("htmx:responseError", (event) => {
    const status = event.detail.xhr.status;
    if (status === 401) signIn();
    else if (status === 429) say("Too many requests. Wait a moment.");
    else say(`That did not work (${status}). Nothing was changed.`);
  });
  /* A tab that nobody sees follows nothing: its stream ends, and goes on after the last event once it is seen again. */
  class Stream extends EventTarget {
    constructor(address) {
      super();
      this.address = address; this.names = new Set(); this.over = false;
      document.addEventListener("visibilitychange", this.look = () => this.turn());
      this.turn();
    }
    turn() {
      if (this.over || document.hidden === !this.source) return;
      if (document.hidden) { this.source.close(); this.source = null; return; }
      this.source = new EventSource(this.address, { withCredentials: true });
      this.source.onopen = (event) => this.onopen?.(event);
      this.source.onerror = (event) => this.onerror?.(event);
      this.names.forEach((name) => this.pass(name));
    }
    pass(name) {
      this.source?.addEventListener(name, (event) => {
        if (event.lastEventId) this.address = this.address.replace(/after=\d+/, `after=${event.lastEventId}`);
        this.dispatchEvent(new MessageEvent(name, { data: event.data, lastEventId: event.lastEventId }));
      });
    }
    addEventListener(name, listener) {
      super.addEventListener(name, listener);
      if (!this.names.has(name)) { this.names.add(name); this.pass(name); }
    }
    get readyState() { return this.source ? this.source.readyState : EventSource.CONNECTING; }
    close() {
      this.over = true;
      document.removeEventListener("visibilitychange", this.look);
      this.source?.close();
    }
  }
  htmx.createEventSource = (address) => new Stream(address);
  document.addEventListener("htmx:beforeRequest", (event) => {  /* what a page asks again by itself can wait, too */
    if (document.hidden && /^every/.test(event.detail.elt.getAttribute("hx-trigger") || "")) event.preventDefault();
  });
  document.addEventListener("htmx:sseOpen", () => live(true));
  document.addEventListener("htmx:sseError", () => live(false));
  document.addEventListener("htmx:sseClose", () => live(false, "finished"));
  function live(on, word) {
    for (const dot of document.querySelectorAll("[data-live]")) {
      dot.classList.toggle("off", !on || dot.dataset.live !== "Live");
      dot.textContent = on ? dot.dataset.live : word === "finished" ? "Ended" : "Reconnecting";
    }
  }

  showScheme();
  localTimes(document);
  drawAll(document);
})();
