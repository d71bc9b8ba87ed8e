// Draws the figures in the colours of the style sheet, and again whenever those change.
(() => {
  "use strict";
  const root = document.documentElement;
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const plots = [...document.querySelectorAll("[data-figure]")];
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // what the button chose; null follows the system

  const colour = (role) => getComputedStyle(root).getPropertyValue(`--${role}`).trim();

  function painted(spec) {
    const text = { color: colour("muted"), size: 11 };
    const data = spec.data.map((trace) => {
      const own = colour(trace.meta);
      const line = { width: trace.meta === "reference" ? 1 : 2, ...trace.line, color: own };
      if (trace.meta === "reference") line.dash = "dash";
      const marker = trace.type === "bar" ? { color: own, opacity: 0.75 } : { color: own, size: 5 };
      return { ...trace, textfont: text, marker, ...(trace.type === "bar" ? {} : { line }) };
    });
    const axis = { gridcolor: colour("rule"), linecolor: colour("rule"), zeroline: false, automargin: true, tickfont: text };
    const x = { ...axis, spikecolor: colour("muted"), spikethickness: 1, spikedash: "dot" };
    const layout = {
      ...spec.layout,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), font: { color: colour("text") } },
      xaxis: { ...x, ...spec.layout.xaxis },
      yaxis: { ...axis, ...spec.layout.yaxis },
    };
    return { data, layout };
  }

  function draw() {
    return Promise.all(
      plots.map((plot) => {
        const { data, layout } = painted(specs[plot.dataset.figure]);
        return Plotly.react(plot, data, layout, { responsive: true, displayModeBar: false });
      }),
    );
  }

  function show(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "light theme" : "dark theme";
    return draw();
  }

  const current = () => chosen ?? (system.matches ? "dark" : "light");
  button.addEventListener("click", () => {
    chosen = current() === "dark" ? "light" : "dark";
    show(chosen);
  });
  system.addEventListener("change", () => show(current()));
  addEventListener("beforeprint", () => show("light"));
  addEventListener("afterprint", () => show(current()));

  show(current()).then(() => {
    root.dataset.drawn = plots.length; // tools/check_report.py waits for it
  });
})();
