// Adds to a page that is complete without it: values under the pointer or by arrow keys, toggles, other views.
(() => {
  'use strict';
  const tip = document.getElementById('tip');
  const texts = new WeakMap();  // what is said of an element
  let active = null;

  const number = (v) => v === null ? 'not known' : String(Number(v.toPrecision(4)));
  const visible = (e) => !e.closest('.off');

  function hide() {
    if (active) active.classList.remove('active');
    active = null;
    tip.hidden = true;
  }

  function show(element) {
    if (active === element) return;
    hide();
    active = element;
    element.classList.add('active');
    tip.textContent = texts.get(element);
    tip.hidden = false;
    const at = element.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - own.width / 2), innerWidth - own.width - 8);
    const above = at.top - own.height - 8;
    tip.style.left = left + 'px';
    tip.style.top = (above >= 4 ? above : Math.min(at.bottom + 8, innerHeight - own.height - 4)) + 'px';
  }

  // The nearest circle within a finger's reach, or the rectangle below the pointer.
  function under(plot, event) {
    const direct = event.target.closest('rect');
    if (direct && texts.has(direct)) return direct;
    let best = null, least = 18;
    for (const circle of plot.querySelectorAll('circle.point')) {
      if (!visible(circle)) continue;
      const at = circle.getBoundingClientRect();
      const away = Math.hypot(at.left + at.width / 2 - event.clientX, at.top + at.height / 2 - event.clientY);
      if (away < least) { least = away; best = circle; }
    }
    return best;
  }

  // From left to right in curves, else in the order of the document.
  function spoken(plot) {
    const all = [...plot.querySelectorAll('circle, rect')].filter((e) => texts.has(e) && visible(e));
    const left = (e) => Number(e.getAttribute('cx'));
    return plot.dataset.panel === undefined ? all : all.sort((a, b) => left(a) - left(b));
  }

  function move(plot, event) {
    const all = spoken(plot);
    if (all.length === 0) return;
    const at = all.indexOf(active);
    const to = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at < 0 ? 0 : at - 1, ArrowUp: at < 0 ? 0 : at - 1,
                Home: 0, End: all.length - 1}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(all[Math.min(Math.max(to, 0), all.length - 1)]);
  }

  function listen(plot) {
    for (const title of plot.querySelectorAll('title')) {
      texts.set(title.parentNode, title.textContent);
      title.remove();  // the browser's own hint would come as well
    }
    plot.tabIndex = 0;
    const follow = (event) => {
      const element = under(plot, event);
      element ? show(element) : hide();
    };
    plot.addEventListener('pointermove', follow);
    plot.addEventListener('pointerdown', follow);
    plot.addEventListener('pointerleave', hide);
    plot.addEventListener('keydown', (event) => move(plot, event));
    plot.addEventListener('blur', hide);
  }

  function place(axis, value) {
    if (value === null) return null;
    if (axis.scale === 'linear') return (value - axis.low) / (axis.high - axis.low);
    const size = Math.max(axis.scale === 'log' ? value : 1 - value, axis.limit);
    if (size <= 0) return null;
    const scaled = axis.scale === 'log' ? Math.log10(size) : -Math.log10(size);
    return (scaled - axis.low) / (axis.high - axis.low);
  }

  function svg(name, attributes, text) {
    const element = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // As tick_middle() of axis.cpp: the last text ends within the picture.
  const tickMiddle = (x, text, whole) => Math.min(x, whole - 2 - 3.8 * text.length);

  function drawGrid(panel, [x, y], [left, top, width, height], whole) {
    const grid = panel.querySelector('.grid');
    grid.replaceChildren();
    for (const [at, text] of x.ticks) {
      const px = left + at * width;
      grid.append(svg('line', {x1: px, x2: px, y1: top, y2: top + height}),
                  svg('text', {x: tickMiddle(px, text, whole), y: top + height + 15, 'text-anchor': 'middle'}, text));
    }
    for (const [at, text] of y.ticks) {
      const py = top + (1 - at) * height;
      grid.append(svg('line', {x1: left, x2: left + width, y1: py, y2: py}),
                  svg('text', {x: left - 6, y: py + 4, 'text-anchor': 'end'}, text));
    }
  }

  function drawPanel(panel, data, view) {
    const which = Number(panel.dataset.panel);
    const [qx, qy] = data.panels[which];
    const [x, y] = view.axes[which];
    const [left, top, width, height] = data.plot;
    const front = new Set(view.fronts[which]);
    drawGrid(panel, [x, y], data.plot, data.width);
    for (const series of panel.querySelectorAll('.series')) {
      const path = [];
      for (const circle of series.querySelectorAll('circle')) {
        const point = Number(circle.dataset.point);
        const values = view.values[point];
        const px = place(x, values[qx]), py = place(y, values[qy]);
        const known = px !== null && py !== null;
        circle.classList.toggle('off', !known);
        if (!known) continue;
        const cx = left + px * width, cy = top + (1 - py) * height;
        circle.setAttribute('cx', cx.toFixed(2));
        circle.setAttribute('cy', cy.toFixed(2));
        circle.setAttribute('r', front.has(point) ? 4.4 : 2.8);
        circle.classList.toggle('front', front.has(point));
        circle.dataset.x = values[qx];
        circle.dataset.y = values[qy];
        path.push([cx, cy]);
      }
      path.sort((a, b) => a[0] - b[0]);
      const line = series.querySelector('polyline');
      if (line) line.setAttribute('points', path.map(([a, b]) => a.toFixed(2) + ',' + b.toFixed(2)).join(' '));
    }
  }

  function describe(panel, data, view) {
    for (const circle of panel.querySelectorAll('circle.point')) {
      const point = Number(circle.dataset.point);
      const lines = data.quantities.map((q, i) => [q.label, view.values[point][i]])
          .filter(([, value]) => value !== null).map(([label, value]) => label + ': ' + number(value));
      texts.set(circle, [data.points[point][1], ...lines].join('\n'));
    }
  }

  function toggles(curves, data) {
    const off = {group: new Set(), kind: new Set()};
    const apply = () => {
      hide();
      for (const series of curves.querySelectorAll('.series')) {
        const [group, kind] = data.series[Number(series.dataset.series)];
        series.classList.toggle('off', off.group.has(group) || off.kind.has(kind));
      }
    };
    for (const set of curves.querySelectorAll('[data-toggles]')) {
      const boxes = [];
      for (const label of set.querySelectorAll('label')) {
        const box = document.createElement('input');
        box.type = 'checkbox';
        box.checked = true;
        box.addEventListener('change', () => {
          off[set.dataset.toggles][box.checked ? 'delete' : 'add'](Number(label.dataset.value));
          apply();
        });
        label.prepend(box);
        boxes.push(box);
      }
      if (boxes.length < 3) continue;
      const all = document.createElement('button');
      all.type = 'button';
      all.textContent = 'all / none';
      all.addEventListener('click', () => {
        const checked = !boxes.every((box) => box.checked);
        for (const box of boxes) {
          if (box.checked === checked) continue;
          box.checked = checked;
          box.dispatchEvent(new Event('change'));
        }
      });
      set.append(all);
    }
  }

  function views(curves, data, draw) {
    if (data.views.length < 2) return;
    const label = document.createElement('label');
    label.className = 'key tools';
    const select = document.createElement('select');
    data.views.forEach((view, i) => select.append(new Option(view.name, i)));
    select.addEventListener('change', () => { hide(); draw(data.views[Number(select.value)]); });
    label.append('Shown: ', select);
    curves.querySelector('.keys').append(label);
  }

  for (const plot of document.querySelectorAll('svg.plot')) listen(plot);
  for (const curves of document.querySelectorAll('.curves')) {
    const data = JSON.parse(curves.querySelector('.curves-data').textContent);
    const panels = curves.querySelectorAll('[data-panel]');
    const draw = (view) => {
      for (const panel of panels) { drawPanel(panel, data, view); describe(panel, data, view); }
    };
    for (const panel of panels) describe(panel, data, data.views[0]);
    toggles(curves, data);
    views(curves, data, draw);
  }
  document.addEventListener('keydown', (event) => { if (event.key === 'Escape') hide(); });
  addEventListener('scroll', hide, {passive: true});

  const save = document.createElement('button');
  save.type = 'button';
  save.className = 'tools';
  save.textContent = 'Save the figures as JSON';
  save.addEventListener('click', () => {
    const link = document.createElement('a');
    const text = JSON.stringify(JSON.parse(document.getElementById('result').textContent), null, 2) + '\n';
    link.href = URL.createObjectURL(new Blob([text], {type: 'application/json'}));
    link.download = 'keyhole.json';
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  document.querySelector('main').append(save);
})();
