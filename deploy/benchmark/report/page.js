"use strict";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const specs = JSON.parse(document.getElementById("charts").textContent);

function config() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
  const text = { labelColor: color("--soft"), titleColor: color("--soft"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelFont: font, titleFont: font };
  return {
    background: "transparent",
    font,
    view: { stroke: null },
    axis: { ...text, gridColor: color("--line"), domainColor: color("--line"), tickColor: color("--line"), titlePadding: 8, labelOverlap: true },
    legend: { ...text, labelColor: color("--text"), labelFontSize: 13, labelLimit: 220 },
  };
}

async function draw() {
  for (const [name, spec] of Object.entries(specs)) {
    const place = document.getElementById("chart-" + name);
    // On a phone a legend has room for fewer names in a row.
    const narrow = place.clientWidth < 420;
    const shown = JSON.parse(JSON.stringify(spec), (key, value) => (key === "columns" && narrow ? Math.ceil(value / 2) : value));
    await vegaEmbed(place, shown, {
      renderer: "svg", actions: false, config: config(), tooltip: { theme: dark.matches ? "dark" : "light" },
    });
  }
  document.body.dataset.drawn = "yes";
}

draw();
dark.addEventListener("change", draw);
