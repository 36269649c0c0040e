"use strict";
// Where the pointer is on a chart: a line through that save in all charts, and its row of the table.
(() => {
  const rows = document.querySelectorAll("#saves tbody tr");
  const names = [...document.querySelectorAll("#saves thead th")].map((cell) => cell.textContent);
  const box = document.createElement("div");
  box.className = "readout";
  box.hidden = true;
  document.body.append(box);
  const charts = [...document.querySelectorAll("svg.chart")].map((chart) => {
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    chart.append(cursor);
    const { left, wide, span } = chart.dataset;
    return { chart, cursor, left: Number(left), wide: Number(wide), span };
  });
  const hide = () => {
    box.hidden = true;
    for (const { cursor } of charts) cursor.removeAttribute("d");
  };
  const show = (place, event) => {
    for (const { cursor, left, wide, span } of charts) {
      cursor.setAttribute("d", `M${left + (place + 0.5) * wide} ${span}`);
    }
    box.replaceChildren();
    [...rows[place].cells].forEach((cell, i) => {
      if (!cell.textContent) return;
      const line = document.createElement("div");
      for (const text of [names[i], cell.textContent]) {
        const part = document.createElement("span");
        part.textContent = text;
        line.append(part);
      }
      box.append(line);
    });
    box.hidden = false;
    const right = event.clientX + box.offsetWidth + 32 > window.innerWidth;
    box.style.left = `${right ? event.clientX - box.offsetWidth - 16 : event.clientX + 16}px`;
    box.style.top = `${Math.min(event.clientY + 16, window.innerHeight - box.offsetHeight - 8)}px`;
  };
  for (const { chart, left, wide } of charts) {
    chart.addEventListener("pointermove", (event) => {
      const bounds = chart.getBoundingClientRect();
      const x = ((event.clientX - bounds.left) * chart.viewBox.baseVal.width) / bounds.width;
      const place = Math.floor((x - left) / wide);
      if (place >= 0 && place < rows.length) show(place, event);
      else hide();
    });
    chart.addEventListener("pointerleave", hide);
  }
})();
