'use strict';
const rows = JSON.parse(document.getElementById('data').textContent);
const panel = document.getElementById('panel'), details = document.getElementById('details');
const REACH = 24;  // a click within this many pixels of a mark selects it

function make(name, text, parent) {
  const node = document.createElement(name);
  node.textContent = text;
  parent.append(node);
  return node;
}

// The panel: the data of a row, and the command that measures it again.
function show(number) {
  const row = rows[number];
  document.querySelectorAll('.chosen').forEach(node => node.classList.remove('chosen'));
  document.querySelectorAll(`.mark[data-row="${number}"]`).forEach(node => node.classList.add('chosen'));
  details.replaceChildren();
  make('b', `${row.kernel} ${row.problem}`, details);
  const facts = make('dl', '', details);
  for (const [name, value] of Object.entries(row)) {
    if (['kernel', 'problem', 'repro'].includes(name)) continue;
    const pair = make('div', '', facts);
    make('dt', name, pair);
    make('dd', value, pair);
  }
  const command = make('pre', row.repro, details);
  const copy = make('button', 'Copy command', details);
  copy.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(row.repro);
      copy.textContent = 'Copied';
    } catch {
      getSelection().selectAllChildren(command);
      copy.textContent = 'Selected: copy it by key';
    }
  });
  make('button', 'Close', details).addEventListener('click', close);
  panel.hidden = false;
}

let origin = null;
function close() {
  panel.hidden = true;
  document.querySelectorAll('.chosen').forEach(node => node.classList.remove('chosen'));
  if (origin) origin.focus();
}

function choose(node) {
  origin = node;
  show(node.dataset.row);
}

// Charts: one tab stop each; arrow keys move between marks, Enter shows the row.
function marks(chart) {
  return [...chart.querySelectorAll('.mark[data-row]')];
}

for (const chart of document.querySelectorAll('figure > svg')) {
  const first = chart.querySelector('.mark[data-row]');
  if (first) first.setAttribute('tabindex', '0');
}

function move(mark, step) {
  const all = marks(mark.closest('svg')), next = all[(all.indexOf(mark) + step + all.length) % all.length];
  mark.setAttribute('tabindex', '-1');
  next.setAttribute('tabindex', '0');
  next.focus();
}

function nearest(chart, event) {
  let best = null, least = REACH;
  for (const mark of marks(chart)) {
    const box = mark.getBoundingClientRect();
    const away = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
    if (away < least) [best, least] = [mark, away];
  }
  return best;
}

document.addEventListener('click', event => {
  const node = event.target.closest('[data-row]');
  if (node) return choose(node);
  const chart = event.target.closest('figure > svg'), mark = chart && nearest(chart, event);
  if (mark) choose(mark);
});

document.addEventListener('keydown', event => {
  if (event.key === 'Escape' && !panel.hidden) return close();
  const mark = event.target.closest('.mark[data-row]');
  if (!mark) return;
  const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
  if (step) move(mark, step);
  else if (event.key === 'Enter' || event.key === ' ') choose(mark);
  else return;
  event.preventDefault();
});

// The table: a filter, and headings that sort.
const table = document.getElementById('all');
if (table) {
  const body = table.tBodies[0], lines = [...body.rows], count = document.getElementById('count');
  document.getElementById('filter').addEventListener('input', event => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const line of lines) {
      const text = line.textContent.toLowerCase();
      line.hidden = !words.every(word => text.includes(word));
      shown += !line.hidden;
    }
    count.textContent = words.length ? `${shown} of ${lines.length} rows` : '';
  });
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    if (place === 0) return;  // the commands
    const button = make('button', head.textContent, head);
    button.type = 'button';
    head.replaceChildren(button);
    button.addEventListener('click', () => {
      const up = head.getAttribute('aria-sort') !== 'ascending';
      heads.forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const value = line => line.cells[place].dataset.value ?? line.cells[place].textContent;
      const known = lines.filter(line => value(line) !== ''), unknown = lines.filter(line => value(line) === '');
      known.sort((a, b) => (up ? 1 : -1) * value(a).localeCompare(value(b), 'en', {numeric: true}));
      if (head.classList.contains('number')) known.sort((a, b) => (up ? 1 : -1) * (value(a) - value(b)));
      body.append(...known, ...unknown);
    });
  });
}
