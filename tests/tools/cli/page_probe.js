// Runs in a real browser, in a document that holds a page in frames of several widths, and writes what is wrong with it into
// <pre id="report">: one JSON object for each frame.
(() => {
  'use strict';

  function boxes(elements) {
    return [...elements].map((e) => ({e, r: e.getBoundingClientRect()})).filter(({r}) => r.width > 0 && r.height > 0);
  }
  const name = (e) => e.tagName + ' "' + (e.textContent || '').trim().slice(0, 40) + '"';

  function overlaps(elements, problems) {
    const all = boxes(elements);
    for (let i = 0; i < all.length; ++i) {
      for (let j = i + 1; j < all.length; ++j) {
        const a = all[i], b = all[j];
        if (a.e.contains(b.e) || b.e.contains(a.e)) continue;
        const width = Math.min(a.r.right, b.r.right) - Math.max(a.r.left, b.r.left);
        const height = Math.min(a.r.bottom, b.r.bottom) - Math.max(a.r.top, b.r.top);
        if (width > 1 && height > 1) problems.push(name(a.e) + ' overlaps ' + name(b.e));
      }
    }
  }

  function layout(doc, win, problems) {
    const beyond = doc.documentElement.scrollWidth - win.innerWidth;
    if (beyond > 0) problems.push('the page is ' + beyond + ' pixels wider than its window');
    overlaps(doc.querySelectorAll('h1, h2, p, dt, dd, .key, legend, button, select, .scroll, figure, pre, .bar-name, .bar-text, ' +
                                  '.bar-plot'), problems);
    for (const e of doc.querySelectorAll('main *:not(.scroll *)')) {
      if (e.closest('svg')) continue;
      const r = e.getBoundingClientRect();
      if (r.width > 0 && r.right > win.innerWidth + 1) problems.push(name(e) + ' reaches beyond the window');
    }
    for (const plot of doc.querySelectorAll('svg.plot')) {
      const texts = plot.querySelectorAll('text');
      overlaps(texts, problems);
      const own = plot.getBoundingClientRect();
      for (const {e, r} of boxes(texts)) {
        if (r.left < own.left - 1 || r.right > own.right + 1 || r.bottom > own.bottom + 1 || r.top < own.top - 1) {
          problems.push(name(e) + ' reaches beyond its picture');
        }
      }
    }
  }

  function pointer(win, plot, element) {
    const r = element.getBoundingClientRect();
    const event = new win.PointerEvent('pointermove', {bubbles: true, clientX: r.left + r.width / 2, clientY: r.top + r.height / 2});
    element.dispatchEvent(event);
  }
  const press = (win, element, key) => element.dispatchEvent(new win.KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));

  function hover(doc, win, problems, done) {
    const tip = doc.getElementById('tip');
    for (const plot of doc.querySelectorAll('svg.plot')) {
      const what = plot.getAttribute('aria-label');
      if (plot.tabIndex !== 0) problems.push(what + ' cannot be reached by keys');
      const first = plot.querySelector('circle.point, rect.cell[data-value], rect.part');
      if (!first) continue;
      pointer(win, plot, first);
      if (tip.hidden || tip.textContent === '') problems.push(what + ': no value under the pointer');
      plot.dispatchEvent(new win.PointerEvent('pointerleave'));
      if (!tip.hidden) problems.push(what + ': a value without a pointer');
      plot.focus();
      if (doc.activeElement !== plot) problems.push(what + ' takes no focus');
      press(win, plot, 'ArrowRight');
      if (tip.hidden) problems.push(what + ': no value by keys');
      const text = tip.textContent;
      press(win, plot, 'End');
      if (plot.querySelectorAll('circle.point, rect[data-value]').length > 1 && tip.textContent === text) {
        problems.push(what + ': keys do not move');
      }
      press(win, plot, 'Escape');
      if (!tip.hidden) problems.push(what + ': Escape does not hide the value');
      ++done.hovered;
    }
  }

  function toggles(doc, problems, done) {
    for (const curves of doc.querySelectorAll('.curves')) {
      const data = JSON.parse(curves.querySelector('.curves-data').textContent);
      const shown = (i, which) => [...curves.querySelectorAll('.series')].filter(
          (s) => data.series[s.dataset.series][which] === i && s.getBoundingClientRect().width > 0).length;
      for (const box of curves.querySelectorAll('[data-toggles] input')) {
        const which = box.closest('fieldset').dataset.toggles === 'group' ? 0 : 1;
        const i = Number(box.closest('label').dataset.value);
        const before = shown(i, which);
        box.click();
        const off = shown(i, which);
        box.click();
        if (before === 0 || off !== 0 || shown(i, which) !== before) {
          problems.push('toggle ' + box.closest('label').textContent + ': ' + [before, off, shown(i, which)]);
        }
        ++done.toggled;
      }
    }
  }

  function holds(curves, data, view, problems) {
    for (const plot of curves.querySelectorAll('[data-panel]')) {
      const [qx, qy] = data.panels[plot.dataset.panel];
      const [left, top, width, height] = data.plot;
      for (const circle of plot.querySelectorAll('circle.point')) {
        const values = data.views[view].values[circle.dataset.point];
        if (values[qx] === null || values[qy] === null) continue;
        if (Number(circle.dataset.x) !== values[qx] || Number(circle.dataset.y) !== values[qy]) {
          problems.push('view ' + view + ' shows ' + circle.dataset.x + ' in place of ' + values[qx]);
        }
        const cx = Number(circle.getAttribute('cx')), cy = Number(circle.getAttribute('cy'));
        if (!(cx >= left && cx <= left + width && cy >= top && cy <= top + height)) {
          problems.push('view ' + view + ': a point lies at ' + [cx, cy]);
        }
      }
    }
  }

  function views(doc, win, problems, done) {
    for (const curves of doc.querySelectorAll('.curves')) {
      const data = JSON.parse(curves.querySelector('.curves-data').textContent);
      const places = () => [...curves.querySelectorAll('circle.point')].map((c) => c.getAttribute('cx') + ' ' + c.getAttribute('cy'));
      const before = places();
      holds(curves, data, 0, problems);
      done.points += before.length;
      const select = curves.querySelector('select');
      if (data.views.length > 1 !== Boolean(select)) problems.push('views without a choice');
      if (!select) continue;
      const choose = (view) => { select.value = view; select.dispatchEvent(new win.Event('change')); };
      for (let view = 1; view < data.views.length; ++view) {
        choose(view);
        holds(curves, data, view, problems);
        ++done.views;
      }
      if (places().join() === before.join()) problems.push('another view moves nothing');
      choose(0);
      // The script places points as the command does.
      places().forEach((place, i) => {
        const [ax, ay] = place.split(' ').map(Number), [bx, by] = before[i].split(' ').map(Number);
        if (Math.hypot(ax - bx, ay - by) > 0.02) problems.push('script and command disagree: ' + place + ', ' + before[i]);
      });
    }
  }

  function probe(frame) {
    const doc = frame.contentDocument, win = frame.contentWindow;
    const problems = [...win.probeErrors];
    const done = {points: 0, hovered: 0, toggled: 0, views: 0};
    layout(doc, win, problems);
    hover(doc, win, problems, done);
    toggles(doc, problems, done);
    views(doc, win, problems, done);
    layout(doc, win, problems);
    return {width: win.innerWidth, problems: problems.slice(0, 20), ...done};
  }

  addEventListener('load', () => {
    const report = document.createElement('pre');
    report.id = 'report';
    try {
      report.textContent = JSON.stringify([...document.querySelectorAll('iframe')].map(probe));
    } catch (error) {
      report.textContent = JSON.stringify([{problems: [String(error.stack)]}]);
    }
    document.body.replaceChildren(report);
  });
})();
