#!lua name=kvrelay_$PROTOCOL

-- The truth about requests and rooms: one function per event of docs/architecture.md, one call per transition.
--
-- KEYS[1] is the root of one model's keys, `kvr:{model}`. All other names are derived from it and share its hash
-- tag, so they live in one slot. ARGV carries scalars as text and lists as JSON. The time is the server's alone.
--
-- <root>:req:<id>          hash    the record; p_* is the claim on the prefill leg, d_* on the decode leg
-- <root>:prompt:<id>       string  prompt token ids, packed int32, until the end
-- <root>:scores:<id>       string  log probabilities of the prompt, where they were asked for
-- <root>:timeline:<id>    list    what happened to a request, see note()
-- <root>:traces           zset    ended requests whose trace is to be exported, by when to try
-- <root>:tok:<id>:0        stream  output position p is entry `p+1-1`, the end after n tokens is `n+1-2`; what is added
--                                  to it is published under the same name
-- <root>:queue:<leg>       zset    legs that wait, by rank
-- <root>:forks:<id>        list    forks of a request: samples of its prompt that wait for its KV
-- <root>:lease             zset    `<id>/<leg>` of each owned leg, by the end of its lease
-- <root>:legs:<boot>       hash    claim nonce -> `<id>/<leg>` of what one worker owns
-- <root>:retracted:<boot>  set     requests that a worker retracted and nobody decodes yet
-- <root>:room:<room>       hash    state, writer, peer, pages and metadata row of one attempt
-- <root>:mail:<boot>       stream  hints to one incarnation of a worker
-- <root>:worker:<boot>     hash    its card; <root>:workers is the index, by last renewal
-- <root>:idem:<key>        hash    request id and body hash of an idempotency key
-- <root>:requests          zset    all known requests, by submission
-- <root>:owned:<owner>     zset    those of one API key
-- <root>:usage:<owner>:<minute>    requests and tokens that the limits of an API key count
-- <root>:deadline          zset    the open ones, by deadline
-- <root>:ended             zset    `<id>/<owner>` of the others, by when their record expires
-- <root>:totals            hash    bytes of the open requests
-- <root>:pace              hash    claims on the prefill queue, and what passed between them while others waited
-- <root>:begun             hash    mark of a prompt's beginning (relay/marks.py) -> the workers that took one with it
-- <root>:epoch             string  when this data began
-- <root>:counts            hash    what has happened since this data began, for metrics: `<what>/<label>...` -> how often
-- <root>:synced            string  written to wait until what came before it is on disk
-- <root>:reaper            hash    when it last ran, and until when it expires no lease
-- <root>:protocol          string  what the processes of this model speak: relay/protocol.py writes $PROTOCOL there

local SCAN_LEGS = 64            -- how far a claim looks into a queue
local SCAN_FAR = 512            -- and past so many legs for which its worker is too small
local STARVED_MS = 2000         -- a leg that waited this long is not overtaken any more
local MOST_LEFT = 8             -- legs that one claim leaves to others that have more of their prompts
local WORTH_TOKENS = 128        -- how much more: less is computed before another worker has claimed it
local MARK_LETTERS = 8          -- of a beginning, see relay/marks.py
local FEW_MARKS = 8             -- the longest ones, which are looked at first: of a next turn they tell all
local MOST_MARKS = 65536        -- that are kept: beyond it some go at random
local MOST_HOLDERS_BYTES = 200  -- of the boots kept with a mark: beyond it the oldest goes
local SEEN_MS = 2500            -- who renewed before that is offered nothing
local FORK_PATIENCE_MS = 2000   -- how long forks wait after the first token of the request they wait for
local MAIL_LENGTH = 10000
local MAIL_TTL_MS = 60000
local WORKER_TTL_MS = 10000
local ENDED_ROOM_TTL_MS = 600000
local IDEMPOTENCY_TTL_MS = 86400000
local MINUTE_MS = 60000
local PACE_MS = 30000           -- how long a claim counts for the pace of the queue
local MOST_ERRORS = 3           -- what is wrong in itself is not tried for ever
local MOST_NOTES = 256          -- of a request's timeline: one that is handed back for ever does not grow for ever
local MOST_TRACES = 10000       -- that wait: when nobody exports the oldest go
local REAP_BATCH = 256          -- how much one reap call does at most, so that it never stalls the server

-- A unified worker's claim on both legs is kept as one on the decode leg, without a room.
local KEPT_AS = { prefill = 'prefill', decode = 'decode', both = 'decode' }
local FIELDS_OF = { prefill = 'p_', decode = 'd_' }

-- In which states a leg has an owner. The prefill leg is done once the KV is complete.
local OWNED_IN = {
  prefill = { prefill = true },
  decode = { prefill = true, ready = true, decode = true },
}
-- In which states its owner may make these calls; in any other the call is stale. All others: while it is owned.
local KV_READY_IN = { prefill = true, ready = true, decode = true }
local EMIT_IN = { ready = true, decode = true }
local FINISH_IN = { ready = true, decode = true, finished = true }
local CLAIM_FORKS_IN = { ready = true, decode = true }

local TERMINAL = { finished = true, failed = true, cancelled = true }

-- Order of the queues: what was retracted goes first, then what lost its worker or was handed back, then new ones by
-- priority, the lowest number first. Lines of batches come after all of these, in the same order among themselves.
local RETRACTED, RECOVERED, NEW, BATCH = 0, 1, 102, 203
local BATCH_PRIORITY = 101
local SUBMITTED_SINCE_MS, CLASS_SPAN_MS = 1.7e12, 1e12

--- One call -----------------------------------------------------------------------------------------------------

-- Raises where another version of kvrelay serves: what this one would do with its records nobody knows.
local function enter(keys)
  if redis.call('GET', keys[1] .. ':protocol') ~= '$PROTOCOL' then error('OTHER_PROTOCOL') end
  local time = redis.call('TIME')
  local now = time[1] * 1000 + time[2] / 1000
  return { root = keys[1], now = now, stamp = string.format('%.3f', now), rings = {} }
end

local function key(c, ...)
  return c.root .. ':' .. table.concat({ ... }, ':')
end

-- The caller of a transition sends the doorbells: the server cannot.
local function ring(c, leg, r)
  table.insert(c.rings, { leg, r.id, r.prompt_tokens })
end

local function later(c, ms)
  return string.format('%.3f', c.now + ms)
end

local function ago(c, ms)
  return string.format('%.3f', c.now - ms)
end

-- One entry of a request's timeline, as relay/timeline.py reads it. Some come twice where a call does.
local function note(c, r, name, leg, detail)
  local timeline = key(c, 'timeline', r.id)
  if redis.call('LLEN', timeline) >= MOST_NOTES then return end
  redis.call('RPUSH', timeline, cjson.encode({ name, c.stamp, leg, tonumber(r.tokens), detail or '' }))
end

-- Counted where it happens, in the same step: no process that dies takes a count with it, and none is made twice.
local function count(c, times, ...)
  if times > 0 then redis.call('HINCRBY', key(c, 'counts'), table.concat({ ... }, '/'), times) end
end

--- Records ------------------------------------------------------------------------------------------------------

-- What transitions look at. Parameters and texts stay in Redis: they may be long.
local LOOKED_AT = {
  'state', 'attempt', 'solo', 'fence', 'room', 'prompt_tokens', 'tokens', 'limit_tokens', 'retractions', 'requeues',
  'requeue_why', 'errors', 'submitted', 'first_token', 'bytes', 'result_ttl_ms', 'retracted_by', 'priority', 'leader',
  'p_boot', 'p_fence', 'p_nonce', 'p_queued', 'd_boot', 'd_fence', 'd_nonce', 'd_queued',
  'owner', 'metered', 'trace', 'progress', 'deadline',
}
-- All that an emission in the middle looks at: there is one for each token.
local EMIT_LOOKS_AT = { 'state', 'tokens', 'first_token', 'priority', 'd_fence', 'd_nonce' }
local MILESTONE = {
  'submitted', 'claimed', 'prefill_start', 'prefill_end', 'first_token', 'ended', 'prompt_tokens', 'cached_tokens',
  'tokens',
}
local OF_ONE_ATTEMPT = {
  'room', 'claimed', 'published', 'prefill_start', 'prefill_end', 'ready', 'decode_claimed',
  'transfer_us', 'transfer_bytes', 'transfer_descriptors', 'spared_bytes', 'known_tokens',
}

local function read(c, id, names)
  names = names or LOOKED_AT
  local values = redis.call('HMGET', key(c, 'req', id), unpack(names))
  if not values[1] then return nil end
  local r = { id = id }
  for i, name in ipairs(names) do r[name] = values[i] or nil end
  return r
end

local function write(c, r, fields)
  local flat = {}
  for name, value in pairs(fields) do
    table.insert(flat, name)
    table.insert(flat, value)
    r[name] = tostring(value)
  end
  redis.call('HSET', key(c, 'req', r.id), unpack(flat))
end

local function erase(c, r, names)
  redis.call('HDEL', key(c, 'req', r.id), unpack(names))
  for _, name in ipairs(names) do r[name] = nil end
end

-- What the owner of a prefill leg had told before it ended otherwise than by telling more.
local function note_progress(c, r)
  if not r.progress then return end
  note(c, r, 'stamps', 'prefill', r.progress)
  erase(c, r, { 'progress' })
end

-- The record and the leg, if this hold (id, leg, fence, nonce) is the claim on it and the state allows the call; else
-- nil: the call is stale. A fence alone may be issued twice, since Redis may lose its last second: the nonce decides.
local function owned(c, hold, states, names)
  local r, leg = read(c, hold[1], names), KEPT_AS[hold[2]]
  local p = FIELDS_OF[leg]
  if not r or r[p .. 'fence'] ~= hold[3] or r[p .. 'nonce'] ~= hold[4] then return nil end
  if not (states or OWNED_IN[leg])[r.state] then return nil end
  return r, leg
end

local function class(r)
  if tonumber(r.retractions) > 0 then return RETRACTED end
  local priority, recovered = tonumber(r.priority or 0), tonumber(r.requeues) > 0
  if priority == BATCH_PRIORITY then return recovered and BATCH or BATCH + 1 end
  return recovered and RECOVERED or NEW + priority
end

-- A score is a double: from 2023 on, and with this many classes, it still tells 1/32 ms apart.
local function rank(r)
  return string.format('%.3f', class(r) * CLASS_SPAN_MS + (r.submitted - SUBMITTED_SINCE_MS))
end

local function enqueue(c, r, leg)
  redis.call('ZADD', key(c, 'queue', leg), rank(r), r.id)
  local p = FIELDS_OF[leg]
  write(c, r, { [p .. 'queued'] = c.stamp, [p .. 'rung'] = c.stamp })
  note(c, r, 'queued', leg)
  ring(c, leg, r)
end

--- Mail ---------------------------------------------------------------------------------------------------------

local function mail(c, boot, ...)
  local box = key(c, 'mail', boot)
  redis.call('XADD', box, 'MAXLEN', '~', MAIL_LENGTH, '*', ...)
  redis.call('PEXPIRE', box, MAIL_TTL_MS)  -- each renewal prolongs it, so only a dead worker's mail goes
end

-- Tell the owner of a leg how it ended, unless it is the caller. The nonce is in it because a worker may have claimed
-- the same request again before it reads this.
local function mail_leg_ended(c, r, leg, why, caller)
  local p = FIELDS_OF[leg]
  local boot, nonce = r[p .. 'boot'], r[p .. 'nonce']
  if not boot or not OWNED_IN[leg][r.state] or leg == caller then return end
  mail(c, boot, 'event', 'ended', 'id', r.id, 'room', r.room or '0', 'leg', leg, 'why', why, 'nonce', nonce)
end

local function mail_ended(c, r, why, caller)
  mail_leg_ended(c, r, 'prefill', why, caller)
  mail_leg_ended(c, r, 'decode', why, caller)
end

--- Rooms --------------------------------------------------------------------------------------------------------

local function room_state(c, r)
  return r.room and redis.call('HGET', key(c, 'room', r.room), 'state') or ''
end

-- A sealed room has served; any other may still be asked about by the side that published pages into it.
local function end_room(c, r)
  if not r.room then return end
  local room = key(c, 'room', r.room)
  if room_state(c, r) == 'sealed' then
    redis.call('DEL', room)
  else
    redis.call('HSET', room, 'state', 'ended')
    redis.call('PEXPIRE', room, ENDED_ROOM_TTL_MS)
  end
end

--- Pace of the prefill queue -------------------------------------------------------------------------------------

-- Nobody waits for a claim any more: what passes until the next one says nothing.
local function pause_pace(c)
  redis.call('HDEL', key(c, 'pace'), 'since')
end

-- A leg left the prefill queue. Claims come in bursts, so that what counts is how many there were in how long: both
-- fade with time.
local function note_pace(c, legs_left)
  local pace = key(c, 'pace')
  local since, claims, ms = unpack(redis.call('HMGET', pace, 'since', 'claims', 'ms'))
  if since then
    local waited_ms = math.min(c.now - since, PACE_MS)  -- in a longer pause nobody was there
    local kept = math.exp(-waited_ms / PACE_MS)
    redis.call('HSET', pace, 'claims', (claims or 0) * kept + 1, 'ms', (ms or 0) * kept + waited_ms)
  end
  if legs_left > 0 then redis.call('HSET', pace, 'since', c.stamp) else pause_pace(c) end
end

-- How long a new request would wait for its claim, as fast as the queue moves now; 0 when nothing goes before it.
local function expected_wait_ms(c, new)
  local ahead = redis.call('ZCOUNT', key(c, 'queue', 'prefill'), '-inf', rank(new))
  local claims, ms = unpack(redis.call('HMGET', key(c, 'pace'), 'claims', 'ms'))
  return claims and ahead * ms / claims or 0
end

--- Legs ---------------------------------------------------------------------------------------------------------

local function give(c, r, asked, boot, nonce, lease_ms)
  local leg = KEPT_AS[asked]
  local p = FIELDS_OF[leg]
  note(c, r, 'claimed', asked, redis.call('HGET', key(c, 'worker', boot), 'name') or boot)
  count(c, 1, 'lease', 'granted')
  redis.call('ZADD', key(c, 'lease'), later(c, lease_ms), r.id .. '/' .. leg)
  redis.call('HSET', key(c, 'legs', boot), nonce, r.id .. '/' .. leg)
  write(c, r, { fence = r.fence + 1, [p .. 'boot'] = boot, [p .. 'fence'] = r.fence + 1, [p .. 'nonce'] = nonce })
end

-- Unclaimed.
local function leave_queue(c, r, leg)
  local queue = key(c, 'queue', leg)
  local was_there = redis.call('ZREM', queue, r.id) == 1
  if was_there and leg == 'prefill' and redis.call('EXISTS', queue) == 0 then pause_pace(c) end
end

-- The leg has no owner any more. The claim stays in the record until the caller erases it.
local function take(c, r, leg)
  local p = FIELDS_OF[leg]
  if not r[p .. 'boot'] then return end
  redis.call('ZREM', key(c, 'lease'), r.id .. '/' .. leg)
  redis.call('HDEL', key(c, 'legs', r[p .. 'boot']), r[p .. 'nonce'])
end

local function take_everything(c, r)
  for _, leg in ipairs({ 'prefill', 'decode' }) do
    take(c, r, leg)
    leave_queue(c, r, leg)
  end
end

local function erase_claim(c, r, leg)
  local p = FIELDS_OF[leg]
  erase(c, r, { p .. 'boot', p .. 'fence', p .. 'nonce' })
end

-- A worker that retracted a request opens itself to new ones only when somebody decodes it again, or nobody has to.
local function forget_retraction(c, r)
  if not r.retracted_by then return end
  redis.call('SREM', key(c, 'retracted', r.retracted_by), r.id)
  erase(c, r, { 'retracted_by' })
end

--- Beginnings of prompts ------------------------------------------------------------------------------------------

-- Of how many tokens a prompt's i-th mark is, as in relay/marks.py.
local function marked_tokens(i)
  return (8 + (i - 1) % 8) * 16 * 2 ^ math.floor((i - 1) / 8)
end

-- What claims have told of a prompt's beginning, or nil where it has no mark: its marks, the longest last; how many of
-- them, from the first on, are `own`: `boot` took a prompt with these; who took one with each of the others; how many
-- tokens of the prompt these workers have by that; since when the leg is left to one of them.
local function beginning(c, r, boot)
  local packed, left = unpack(redis.call('HMGET', key(c, 'req', r.id), 'marks', 'left'))
  if not packed then return nil end
  local marks, holders, has, last, own = {}, {}, {}, nil, 0
  for i = 1, #packed / MARK_LETTERS do marks[i] = packed:sub((i - 1) * MARK_LETTERS + 1, i * MARK_LETTERS) end
  local to = #marks
  while to > own do
    local from = to == #marks and math.max(1, to - FEW_MARKS + 1) or 1
    local found = redis.call('HMGET', key(c, 'begun'), unpack(marks, from, to))
    for i = to, from, -1 do
      local boots = found[i - from + 1]
      if boots and boots ~= last then
        last = boots
        for other in boots:gmatch('%S+') do has[other] = has[other] or marked_tokens(i) end
        if has[boot] then own = i break end
      end
      holders[i] = boots
    end
    to = from - 1
  end
  return { marks = marks, own = own, holders = holders, has = has, left = left }
end

local function lives(c, boot)
  local seen = redis.call('ZSCORE', key(c, 'workers'), boot)
  return seen and c.now - seen < SEEN_MS
end

-- Of the prompts that a worker has claimed, as far as the records tell: none of these is whole yet.
local function uncomputed_tokens(c, boot)
  local tokens = 0
  for _, member in ipairs(redis.call('HVALS', key(c, 'legs', boot))) do
    local id, leg = member:match('^(.*)/(%l+)$')
    local prompt, emitted, known, first =
      unpack(redis.call('HMGET', key(c, 'req', id), 'prompt_tokens', 'tokens', 'known_tokens', 'first_token'))
    if leg == 'prefill' or not first then tokens = tokens + prompt + emitted - (known or 0) end
  end
  return tokens
end

-- The living worker that would be done with this prompt first, by WORTH_TOKENS at least before `boot`: for what it has more
-- of it, less what it has more to compute before.
local function better_place(c, known, boot)
  local mine, best, most = known.has[boot] or 0, nil, WORTH_TOKENS
  for other, tokens in pairs(known.has) do
    if tokens - mine >= most and lives(c, other) then
      known.behind = known.behind or uncomputed_tokens(c, boot)
      local gain = tokens - uncomputed_tokens(c, other) - mine + known.behind
      if gain >= most then best, most = other, gain end
    end
  end
  return best
end

-- For how many ms more a leg is left to a better placed worker, which is told so; nil: not at all, or no longer. It is
-- left once, for `wait_ms`, whatever becomes of that worker, and not where its deadline is near.
local function left_ms(c, r, known, boot, wait_ms)
  if not known or r.deadline - c.now < STARVED_MS then return nil end
  if known.left and c.now - known.left >= wait_ms then return nil end
  local other = better_place(c, known, boot)
  if not other then return nil end
  if known.left then return known.left + wait_ms - c.now end
  write(c, r, { left = c.stamp })
  mail(c, other, 'event', 'offered', 'id', r.id)
  return wait_ms
end

-- `boot` takes a leg, and so has the prompt's beginning from now on. How many tokens of it there were before.
local function note_beginning(c, known, boot)
  local begun, told, most = key(c, 'begun'), {}, 0
  for i = known.own + 1, #known.marks do
    local others = known.holders[i]
    if others and #others > MOST_HOLDERS_BYTES then others = others:match(' (.*)') end
    told[#told + 1] = known.marks[i]
    told[#told + 1] = others and others .. ' ' .. boot or boot
  end
  if #told > 0 then
    redis.call('HSET', begun, unpack(told))
    local excess = redis.call('HLEN', begun) - MOST_MARKS
    if excess > 0 then redis.call('HDEL', begun, unpack(redis.call('HRANDFIELD', begun, excess))) end
  end
  local mine = known.has[boot] or 0
  for _, tokens in pairs(known.has) do most = math.max(most, tokens) end
  count(c, 1, 'beginning', most == 0 and 'new' or most - mine < WORTH_TOKENS and 'here' or 'elsewhere')
  return mine
end

--- Forks ---------------------------------------------------------------------------------------------------------

-- A fork is queued, but stands in no queue: `leader` names the request whose KV it waits for. It ceases to be one when
-- it is claimed beside its leader, set free, or ended; then nothing in its record tells that it was.
local function stop_waiting(c, r)
  if not r.leader then return end
  redis.call('LREM', key(c, 'forks', r.leader), 1, r.id)
  erase(c, r, { 'leader' })
end

-- The leader will not share its KV (again): each of its forks goes its own way.
local function free_forks(c, leader)
  for _, id in ipairs(redis.call('LRANGE', key(c, 'forks', leader.id), 0, -1)) do
    local r = read(c, id)
    stop_waiting(c, r)
    enqueue(c, r, 'prefill')
  end
end

--- Limits of API keys --------------------------------------------------------------------------------------------

local function usage(c, owner, minutes_ago)
  return key(c, 'usage', owner, math.floor(c.now / MINUTE_MS) - minutes_ago)
end

local function use(c, owner, requests, tokens)
  local now = usage(c, owner, 0)
  redis.call('HINCRBY', now, 'requests', requests)
  redis.call('HINCRBY', now, 'tokens', tokens)
  redis.call('PEXPIRE', now, 2 * MINUTE_MS)
end

-- How long until `wanted` more keep within `limit` a minute, 0 for now. A sliding window, as far as two counters tell:
-- the minute before counts by the share of it that is less than a minute ago.
local function too_early_ms(c, owner, what, limit, wanted)
  if limit == 0 then return 0 end
  local before = tonumber(redis.call('HGET', usage(c, owner, 1), what) or 0)
  local current = tonumber(redis.call('HGET', usage(c, owner, 0), what) or 0)
  local elapsed = c.now % MINUTE_MS
  local excess = current + before * (1 - elapsed / MINUTE_MS) + wanted - limit
  if excess <= 0 then return 0 end
  if wanted > limit then return MINUTE_MS end
  if current + wanted <= limit then return excess / before * MINUTE_MS end
  return MINUTE_MS - elapsed + (current + wanted - limit) / current * MINUTE_MS
end

--- Transitions that several events share -------------------------------------------------------------------------

-- Back to the start of its way, whatever was reached: the next attempt works from prompt and stream.
local function requeue(c, r, why, caller)
  mail_ended(c, r, why, caller)
  end_room(c, r)
  take_everything(c, r)
  erase_claim(c, r, 'prefill')
  erase_claim(c, r, 'decode')
  erase(c, r, OF_ONE_ATTEMPT)
  write(c, r, { state = 'queued', requeues = r.requeues + 1, requeue_why = why })
  enqueue(c, r, 'prefill')
  free_forks(c, r)
end

-- Nothing was published yet, so prefill goes on and only the decode leg looks for another worker.
local function requeue_decode(c, r, why, caller)
  mail_leg_ended(c, r, 'decode', why, caller)
  take(c, r, 'decode')
  erase_claim(c, r, 'decode')
  erase(c, r, { 'decode_claimed' })
  write(c, r, { requeues = r.requeues + 1, requeue_why = why })
  enqueue(c, r, 'decode')
end

-- The owner of a leg is gone or gives it back. `reason` is for timeline and metrics, `why` for the mail.
local function give_back(c, r, leg, reason, why, caller)
  local prefill_goes_on = leg == 'decode' and room_state(c, r) == 'open'
  if not prefill_goes_on then note_progress(c, r) end
  note(c, r, 'released', leg, reason)
  count(c, 1, 'returned', leg, reason)
  if prefill_goes_on then
    requeue_decode(c, r, why, caller)
  else
    requeue(c, r, why, caller)
  end
end

-- The one way to a terminal state. `outcome` goes into the record and into the last entry of the token stream.
local function end_request(c, r, state, outcome, held_text, caller)
  local kind = tonumber(r.priority or 0) == BATCH_PRIORITY and 'batch' or 'client'
  count(c, 1, 'ended', kind, state, outcome.error_code or outcome.finish_reason or state, r.state)
  mail_ended(c, r, state, caller)
  end_room(c, r)
  take_everything(c, r)
  forget_retraction(c, r)
  stop_waiting(c, r)
  free_forks(c, r)

  local marker = { 'state', state }
  if held_text and held_text ~= '' then
    table.insert(marker, 'text')
    table.insert(marker, held_text)
  end
  for name, value in pairs(outcome) do
    table.insert(marker, name)
    table.insert(marker, value)
  end
  local stream = key(c, 'tok', r.id, 0)
  redis.call('XADD', stream, (r.tokens + 1) .. '-2', unpack(marker))
  redis.call('PUBLISH', stream, cjson.encode({ start = tonumber(r.tokens), ending = marker }))
  outcome.state, outcome.ended = state, c.stamp
  write(c, r, outcome)

  redis.call('DEL', key(c, 'prompt', r.id))
  redis.call('PEXPIRE', stream, r.result_ttl_ms)
  redis.call('PEXPIRE', key(c, 'scores', r.id), r.result_ttl_ms)
  note_progress(c, r)
  note(c, r, 'ended', '', state)
  redis.call('PEXPIRE', key(c, 'timeline', r.id), r.result_ttl_ms)
  if r.trace and r.trace:find('-01 ', 1, true) then
    redis.call('ZADD', key(c, 'traces'), c.stamp, r.id)
    redis.call('ZREMRANGEBYRANK', key(c, 'traces'), 0, -MOST_TRACES - 1)
  end
  redis.call('PEXPIRE', key(c, 'req', r.id), r.result_ttl_ms)
  redis.call('ZREM', key(c, 'deadline'), r.id)
  redis.call('ZADD', key(c, 'ended'), later(c, r.result_ttl_ms), r.id .. '/' .. (r.owner or ''))
  if r.metered then use(c, r.owner, 0, r.tokens) end
  redis.call('HINCRBY', key(c, 'totals'), 'open_bytes', -r.bytes)
end

local function fail_request(c, r, code, message, caller)
  end_request(c, r, 'failed', { error_code = code, error_message = message }, nil, caller)
end

-- Forks go first: their deadline is that of their leader, whose end would set them free for nothing.
local function fail_late(c, r)
  for _, id in ipairs(redis.call('LRANGE', key(c, 'forks', r.id), 0, -1)) do fail_late(c, read(c, id)) end
  fail_request(c, r, 'timeout', 'The request did not finish before its deadline.')
end

--- Events: gateway ----------------------------------------------------------------------------------------------

-- The requests that one client's call makes; a fork takes the prompt of its leader, which comes before it.
local function group_of(args, first)
  local group, prompts, bytes, tokens = {}, {}, 0, 0
  for i = first, #args, 9 do
    local id, prompt, marks, params, scores_bytes, prompt_tokens, limit_tokens, leader, trace = unpack(args, i, i + 8)
    if leader ~= '' then prompt, marks = unpack(prompts[leader]) else tokens = tokens + prompt_tokens end
    prompts[id] = { prompt, marks }
    local own_bytes = #prompt + #params + scores_bytes
    bytes = bytes + own_bytes
    table.insert(group, { id = id, prompt = prompt, fields = {
      params = params, prompt_tokens = prompt_tokens, limit_tokens = limit_tokens, bytes = own_bytes,
      leader = leader ~= '' and leader or nil, trace = trace ~= '' and trace or nil,
      marks = marks ~= '' and marks or nil,
    } })
  end
  return group, bytes, tokens
end

-- The rings of an earlier call may have been lost with its caller. Ids of a group begin with the id of its first.
local function ring_earlier(c, group, first)
  for _, member in ipairs(group) do
    local r = read(c, first .. member.id:sub(#group[1].id + 1))
    if r and r.state == 'queued' and not r.leader then ring(c, 'prefill', r) end
  end
end

-- timeout_ms, kind, idempotency key, body hash, max_open_requests, max_open_bytes, result_ttl_ms, priority, owner,
-- requests and tokens per minute, ms since the call arrived, then of each request: id, prompt, its marks, params, bytes
-- of its scores, prompt_tokens, limit_tokens, leader or '', trace or ''
-- -> outcome, id of the first, rings, ms after which it may come again
local function submit(keys, args)
  local c = enter(keys)
  local group, bytes, tokens = group_of(args, 13)
  local first = group[1].id
  local idempotency = args[3] ~= '' and key(c, 'idem', args[3])
  local owner, most_requests, most_tokens = args[9], tonumber(args[10]), tonumber(args[11])

  local known = idempotency and redis.call('HMGET', idempotency, 'id', 'body') or { false, false }
  if known[1] and known[2] ~= args[4] then return { 'conflict', known[1], {}, 0 } end
  if known[1] or read(c, first) then
    ring_earlier(c, group, known[1] or first)
    return { (known[1] or first) == first and 'new' or 'duplicate', known[1] or first, c.rings, 0 }
  end

  local open = redis.call('ZCARD', key(c, 'deadline'))
  local open_bytes = redis.call('HGET', key(c, 'totals'), 'open_bytes') or 0
  local full = open + #group > tonumber(args[5]) or open_bytes + bytes > tonumber(args[6])
  if full then return { 'full', first, {}, 0 } end
  local early_ms = math.max(
    too_early_ms(c, owner, 'requests', most_requests, 1), too_early_ms(c, owner, 'tokens', most_tokens, tokens))
  if early_ms > 0 then return { 'limited', first, {}, math.ceil(early_ms) } end
  local wait_ms = expected_wait_ms(c, { priority = args[8], retractions = 0, requeues = 0, submitted = c.now })
  if wait_ms > tonumber(args[1]) then return { 'late', first, {}, math.ceil(wait_ms - args[1]) } end
  if most_requests + most_tokens > 0 then use(c, owner, 1, tokens) end

  for _, member in ipairs(group) do
    local r = { id = member.id }
    write(c, r, member.fields)
    write(c, r, {
      state = 'queued', kind = args[2], priority = args[8], tokens = 0, cached_tokens = 0,
      owner = owner, metered = most_tokens > 0 and 1 or nil,
      attempt = 1, fence = 0, retractions = 0, requeues = 0, result_ttl_ms = args[7],
      submitted = c.stamp, deadline = later(c, args[1]),
    })
    redis.call('SET', key(c, 'prompt', r.id), member.prompt)
    redis.call('ZADD', key(c, 'requests'), c.stamp, r.id)
    redis.call('ZADD', key(c, 'owned', owner), c.stamp, r.id)
    redis.call('ZADD', key(c, 'deadline'), r.deadline, r.id)
    note(c, r, 'submitted', '', args[12])
    if r.leader then
      note(c, r, 'waits', '', r.leader)
      redis.call('RPUSH', key(c, 'forks', r.leader), r.id)
    else
      enqueue(c, r, 'prefill')
    end
  end
  redis.call('HINCRBY', key(c, 'totals'), 'open_bytes', bytes)
  count(c, #group, 'submitted', args[2])
  if idempotency then
    redis.call('HSET', idempotency, 'id', first, 'body', args[4])
    redis.call('PEXPIRE', idempotency, IDEMPOTENCY_TTL_MS)
  end
  return { 'new', first, c.rings, 0 }
end

-- id, id... -> the record of the first, empty if there is none; rings
local function cancel(keys, args)
  local c = enter(keys)
  for i = #args, 1, -1 do  -- forks come after their leader, whose end would set them free
    local r = read(c, args[i])
    if r and not TERMINAL[r.state] then end_request(c, r, 'cancelled', {}) end
  end
  return { redis.call('HGETALL', key(c, 'req', args[1])), c.rings }
end

-- id -> the record, empty if there is none
local function record(keys, args)
  return redis.call('HGETALL', key(enter(keys), 'req', args[1]))
end

-- id -> the record, the entries of its timeline, now
local function timeline(keys, args)
  local c = enter(keys)
  local entries = redis.call('LRANGE', key(c, 'timeline', args[1]), 0, -1)
  return { redis.call('HGETALL', key(c, 'req', args[1])), entries, c.stamp }
end

-- limit, ms until they are due again -> ids of ended requests whose trace is due
local function take_traces(keys, args)
  local c = enter(keys)
  local ids = redis.call('ZRANGEBYSCORE', key(c, 'traces'), '-inf', c.stamp, 'LIMIT', 0, args[1])
  for _, id in ipairs(ids) do redis.call('ZADD', key(c, 'traces'), later(c, args[2]), id) end
  return ids
end

-- id, id... -> nothing
local function drop_traces(keys, args)
  redis.call('ZREM', key(enter(keys), 'traces'), unpack(args))
  return {}
end

-- idempotency key -> id and body hash of the request it stands for, or nil
local function earlier(keys, args)
  local known = redis.call('HMGET', key(enter(keys), 'idem', args[1]), 'id', 'body')
  return known[1] and known or nil
end

-- leg -> how many wait for it; of the first of them, whether it is a retracted one and since when it waits
local function waiting(keys, args)
  local c = enter(keys)
  local queue = key(c, 'queue', args[1])
  local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  if not first[1] then return { 0, 0, '0' } end
  local retracted = tonumber(first[2]) < (RETRACTED + 1) * CLASS_SPAN_MS
  local since = redis.call('HGET', key(c, 'req', first[1]), FIELDS_OF[args[1]] .. 'queued')
  return { redis.call('ZCARD', queue), retracted and 1 or 0, since or '0' }
end

-- How long the oldest of these classes has waited. Within a class it is the first one that came first.
local function oldest_ms(c, leg, first, last)
  local oldest = 0
  while true do
    local range = { first * CLASS_SPAN_MS, '(' .. (last + 1) * CLASS_SPAN_MS }
    local head = redis.call('ZRANGEBYSCORE', key(c, 'queue', leg), range[1], range[2], 'WITHSCORES', 'LIMIT', 0, 1)
    if not head[1] then return math.floor(oldest) end
    local queued = redis.call('HGET', key(c, 'req', head[1]), FIELDS_OF[leg] .. 'queued')
    oldest = math.max(oldest, c.now - (queued or c.now))
    first = math.floor(head[2] / CLASS_SPAN_MS) + 1
  end
end

-- -> for each queue: leg, whether lines of batches, how many wait, ms for which the oldest has
local function backlog(keys)
  local c = enter(keys)
  local found = {}
  for _, leg in ipairs({ 'prefill', 'decode' }) do
    local all = redis.call('ZCARD', key(c, 'queue', leg))
    local lines = redis.call('ZCOUNT', key(c, 'queue', leg), BATCH * CLASS_SPAN_MS, '+inf')
    table.insert(found, { leg, 0, all - lines, oldest_ms(c, leg, RETRACTED, BATCH - 1) })
    table.insert(found, { leg, 1, lines, oldest_ms(c, leg, BATCH, BATCH + 1) })
  end
  return found
end

-- limit, id before which to start or '', owner or '*' -> id, record, id, record..., empty records among them if they
-- have expired
local function list_requests(keys, args)
  local c = enter(keys)
  local index = args[3] == '*' and key(c, 'requests') or key(c, 'owned', args[3])
  local first = 0
  if args[2] ~= '' then
    local rank = redis.call('ZREVRANK', index, args[2])
    if not rank then return {} end
    first = rank + 1
  end
  local found = {}
  for _, id in ipairs(redis.call('ZREVRANGE', index, first, first + args[1] - 1)) do
    table.insert(found, id)
    table.insert(found, redis.call('HGETALL', key(c, 'req', id)))
  end
  return found
end

--- Events: claims -----------------------------------------------------------------------------------------------

-- The request whose leg this worker should take, or nil; what is known of its beginning; and for how many ms others were
-- left to their workers. In order of the queue: the first that fits and is not left, or the wanted one if it ranks with
-- it. What is past its deadline ends instead. Nothing overtakes a leg that starves and would fit an empty worker, and
-- only its like one that is left. What could outgrow this worker is for larger ones, the prefill leg too: a later attempt
-- prefills the stream as well.
local function choose(c, leg, boot, free_tokens, capacity_tokens, wanted, wait_ms)
  -- Who had to retract a request has no room for new ones before it is back. (Nobody retracts from a prefill worker.)
  local only_retracted = redis.call('EXISTS', key(c, 'retracted', boot)) == 1
  local rank = wanted ~= '' and redis.call('ZRANK', key(c, 'queue', leg), wanted)
  if not rank or rank >= SCAN_LEGS then wanted = '' end  -- somebody has it already: no need to look for it
  local first, known, head, again_ms
  local left = 0
  for from = 0, SCAN_FAR - 1, SCAN_LEGS do
    local ids = redis.call('ZRANGE', key(c, 'queue', leg), from, from + SCAN_LEGS - 1)
    local too_small = #ids == SCAN_LEGS
    for _, id in ipairs(ids) do
      local r = read(c, id)
      local late = tonumber(r.deadline) <= c.now
      local needed = r.prompt_tokens + r.tokens + 1
      local could_outgrow = tonumber(r.limit_tokens) > capacity_tokens
      too_small = too_small and could_outgrow
      if only_retracted and class(r) ~= RETRACTED then return first, known, again_ms end
      if head and class(r) ~= class(head) then return first, known, again_ms end
      if late then
        fail_late(c, r)
      elseif not could_outgrow and needed <= free_tokens then
        head = head or r
        if not first or id == wanted then
          local its = wait_ms > 0 and beginning(c, r, boot) or nil
          local ms = left_ms(c, r, its, boot, wait_ms)
          if ms then
            again_ms, left = math.min(ms, again_ms or ms), left + 1
          elseif wanted == '' or id == wanted then
            return r, its
          else
            first, known = r, its
          end
          if id == wanted then wanted = '' end
        end
        if left == MOST_LEFT or first and wanted == '' then return first, known, again_ms end
      elseif not could_outgrow and c.now - r[FIELDS_OF[leg] .. 'queued'] > STARVED_MS then
        return first, known, again_ms
      end
    end
    if not too_small then return first, known, again_ms end
  end
  return first, known, again_ms
end

local function claimed(c, r, leg)
  local p = FIELDS_OF[KEPT_AS[leg]]
  local emitted = {}
  if tonumber(r.tokens) > 0 then
    for _, entry in ipairs(redis.call('XRANGE', key(c, 'tok', r.id, 0), '-', '+')) do
      table.insert(emitted, entry[2][2])
    end
  end
  local params = redis.call('HGET', key(c, 'req', r.id), 'params')
  local prompt = redis.call('GET', key(c, 'prompt', r.id))
  local left_ms, forks = string.format('%.3f', r.deadline - c.now), redis.call('LLEN', key(c, 'forks', r.id))
  return { r.id, r[p .. 'fence'], r[p .. 'nonce'], r.room or '0', r.attempt, r.solo or '0', prompt, emitted,
           params, r.p_boot or '', left_ms, r.submitted, forks, c.stamp,
           r.trace or '', c.rings }
end

-- leg, boot, nonce, room, free_tokens, capacity_tokens, lease_ms, wanted, ms for which one may be left to a worker that
-- has more of its prompt -> see claimed(); or nil; or the ms for which what it could take is left to others
local function claim(keys, args)
  local c = enter(keys)
  local leg, boot, nonce, room = args[1], args[2], args[3], args[4]
  local queue = leg == 'decode' and 'decode' or 'prefill'

  local mine = redis.call('HGET', key(c, 'legs', boot), nonce)
  if mine then
    local r = read(c, mine:match('^(.*)/'))
    if leg == 'prefill' and not r.d_boot then ring(c, 'decode', r) end
    return claimed(c, r, leg)
  end

  if leg == 'prefill' and redis.call('EXISTS', key(c, 'room', room)) == 1 then return nil end  -- rooms are used once
  local r, known, again_ms = choose(c, queue, boot, tonumber(args[5]), tonumber(args[6]), args[8], tonumber(args[9]))
  if not r then return again_ms and { math.ceil(again_ms) } end
  local known_tokens = known and note_beginning(c, known, boot) or nil
  redis.call('ZREM', key(c, 'queue', queue), r.id)
  if queue == 'prefill' then note_pace(c, redis.call('ZCARD', key(c, 'queue', queue))) end

  if leg == 'prefill' then
    give(c, r, 'prefill', boot, nonce, args[7])
    redis.call('HSET', key(c, 'room', room), 'state', 'open', 'id', r.id, 'writer', boot)
    write(c, r, { state = 'prefill', room = room, claimed = c.stamp, known_tokens = known_tokens })
    enqueue(c, r, 'decode')
  else
    give(c, r, leg, boot, nonce, args[7])
    write(c, r, { decode_claimed = c.stamp })
    forget_retraction(c, r)
    if leg == 'both' then
      write(c, r, { state = 'decode', claimed = c.stamp, known_tokens = known_tokens })
      count(c, 1, 'local', 'unified')
    end
  end
  return claimed(c, r, leg)
end

-- hold of the leader's decode leg, boot, lease_ms, a nonce for each fork there is room for -> see claimed() of each
-- fork that is claimed, rings for the others
local function claim_forks(keys, args)
  local c = enter(keys)
  local boot, lease_ms, nonces = args[5], args[6], cjson.decode(args[7])
  local got = {}
  for _, nonce in ipairs(nonces) do  -- a repeat of this call
    local mine = redis.call('HGET', key(c, 'legs', boot), nonce)
    if mine then table.insert(got, claimed(c, read(c, mine:match('^(.*)/')), 'both')) end
  end
  local leader = owned(c, args, CLAIM_FORKS_IN)
  if #got > 0 or not leader then return { got, {} } end

  -- As in choose: who had to retract a request has no room for new ones.
  local only_retracted = redis.call('EXISTS', key(c, 'retracted', boot)) == 1
  for _, nonce in ipairs(only_retracted and {} or nonces) do
    local id = redis.call('LINDEX', key(c, 'forks', leader.id), 0)
    if not id then break end
    local r = read(c, id)
    stop_waiting(c, r)
    give(c, r, 'both', boot, nonce, lease_ms)
    write(c, r, { state = 'decode', claimed = c.stamp, decode_claimed = c.stamp })
    count(c, 1, 'local', 'fork')
    table.insert(got, claimed(c, r, 'both'))
  end
  free_forks(c, leader)
  return { got, c.rings }
end

--- Events: owners -----------------------------------------------------------------------------------------------

-- The caller does not own the leg (any more): it writes nothing.
local function stale(c)
  count(c, 1, 'lease', 'fenced')
  return { 0, {} }
end

local function done(c)
  return { 1, c.rings }
end

-- hold, room, pages, row, first page -> ok, rings. The pages before the first one are there already.
local function publish(keys, args)
  local c = enter(keys)
  local r = owned(c, args)
  if not r or r.room ~= args[5] then return stale(c) end
  if room_state(c, r) ~= 'open' then return done(c) end
  local where = { 'peer', r.d_boot, 'nonce', r.d_nonce, 'pages', args[6], 'row', args[7], 'first_page', args[8] }
  redis.call('HSET', key(c, 'room', r.room), 'state', 'published', unpack(where))
  write(c, r, { published = c.stamp })
  note(c, r, 'published', 'decode', args[8])
  mail(c, r.p_boot, 'event', 'published', 'id', r.id, 'room', r.room, unpack(where))
  return done(c)
end

-- room -> peer, nonce, pages, row, first page, or nil
local function published(keys, args)
  local room = key(enter(keys), 'room', args[1])
  local values = redis.call('HMGET', room, 'state', 'peer', 'nonce', 'pages', 'row', 'first_page')
  if values[1] ~= 'published' then return nil end
  return { values[2], values[3], values[4], values[5], values[6] }
end

local function note_prefill(c, r, leg, cached_tokens, start, stop, stamps)
  write(c, r, { cached_tokens = cached_tokens, prefill_start = start, prefill_end = stop })
  erase(c, r, { 'progress' })
  note(c, r, 'stamps', leg, stamps)
end

-- hold, room, cached_tokens, start and end of prefill, stamps, transfer us, bytes, descriptors, spared bytes -> ok, rings
local function kv_ready(keys, args)
  local c = enter(keys)
  local r = owned(c, args, KV_READY_IN)
  if not r or r.room ~= args[5] then return stale(c) end
  if r.state ~= 'prefill' then return done(c) end
  if room_state(c, r) ~= 'published' then return stale(c) end
  redis.call('HSET', key(c, 'room', r.room), 'state', 'sealed')
  take(c, r, 'prefill')
  note_prefill(c, r, 'prefill', args[6], args[7], args[8], args[9])
  write(c, r, { state = 'ready', ready = c.stamp, transfer_us = args[10], transfer_bytes = args[11],
                transfer_descriptors = args[12], spared_bytes = args[13] })
  note(c, r, 'ready', 'prefill')
  mail(c, r.d_boot, 'event', 'ready', 'id', r.id, 'room', r.room)
  return done(c)
end

-- hold, log probabilities of the prompt -> nothing. The first ones stay: somebody may have read them.
local function note_scores(keys, args)
  local c = enter(keys)
  local r = owned(c, args)
  if r then redis.call('SET', key(c, 'scores', r.id), args[5], 'NX') end
  return {}
end

local function append(c, r, e, text)
  local stream = key(c, 'tok', r.id, 0)
  local n = tonumber(r.tokens)
  for i = n - e.start + 1, #e.tokens do
    local token_id, text, logprobs = e.tokens[i][1], e.tokens[i][2], e.tokens[i][3]
    local entry = (n + 1) .. '-1'
    if logprobs then
      redis.call('XADD', stream, entry, 'token', token_id, 'text', text, 'logprobs', logprobs)
    else
      redis.call('XADD', stream, entry, 'token', token_id, 'text', text)
    end
    n = n + 1
  end
  if n > tonumber(r.tokens) then
    redis.call('PUBLISH', stream, text)
    local first = r.state == 'ready' or e.prefilled
    write(c, r, { state = 'decode', tokens = n, first_token = r.first_token or c.stamp })
    if first then note(c, r, 'first', 'decode') end
  end
end

-- How far a request has come that somebody waits for, told to whom it concerns once; not so of lines of batches.
local function milestone(c, r, first)
  if tonumber(r.priority or 0) == BATCH_PRIORITY then return {} end
  return { first and 1 or 0, unpack(redis.call('HMGET', key(c, 'req', r.id), unpack(MILESTONE))) }
end

-- `text` is what `e` was decoded from: followers get it as it is.
local function emit_one(c, e, text)
  local whole = e.finish or e.prefilled
  local r = owned(c, e.hold, e.finish and FINISH_IN or EMIT_IN, not whole and EMIT_LOOKS_AT or nil)
  if not r then
    count(c, 1, 'lease', 'fenced')
    return { 'stale', 0, {}, {} }
  end
  if r.state == 'finished' then return { 'done', 0, {}, {} } end
  if e.start > tonumber(r.tokens) then return { 'gap', tonumber(r.tokens), {}, {} } end
  if e.prefilled then note_prefill(c, r, 'both', unpack(e.prefilled)) end
  local waited = not r.first_token
  append(c, r, e, text)
  local first = waited and r.first_token
  if not e.finish then return { 'ok', 0, {}, first and milestone(c, r, true) or {} } end
  local outcome = { finish_reason = e.finish.reason, stop_reason = e.finish.stop_reason }
  c.rings = {}
  end_request(c, r, 'finished', outcome, e.finish.text, 'decode')
  return { 'done', 0, c.rings, milestone(c, r, first) }
end

-- one JSON object per request of an engine step -> per request: outcome, expected position, rings, milestone or {}
local function emit(keys, args)
  local c = enter(keys)
  local answers = {}
  for i, text in ipairs(args) do answers[i] = emit_one(c, cjson.decode(text), text) end
  return answers
end

-- hold, why, stamps or '' -> ok, rings
local function release(keys, args)
  local c = enter(keys)
  local r, leg = owned(c, args)
  if not r then return stale(c) end
  if args[6] ~= '' then note(c, r, 'stamps', leg, args[6]) end
  if args[5] == 'error' then
    write(c, r, { errors = (r.errors or 0) + 1 })
    if tonumber(r.errors) >= MOST_ERRORS then
      fail_request(c, r, 'corrupted', 'KV or output of this request was wrong each time: see the logs of the workers.', leg)
      return done(c)
    end
  end
  if args[5] == 'retract' and r.state ~= 'prefill' then
    redis.call('SADD', key(c, 'retracted', r.d_boot), r.id)
    write(c, r, { retractions = r.retractions + 1, retracted_by = r.d_boot })
  end
  give_back(c, r, leg, args[5], 'requeued', leg)
  return done(c)
end

-- hold, code, message -> ok, rings
local function fail(keys, args)
  local c = enter(keys)
  local r, leg = owned(c, args)
  if not r then return stale(c) end
  fail_request(c, r, args[5], args[6], leg)
  return done(c)
end

--- Events: workers ----------------------------------------------------------------------------------------------

-- Which life of the server's data this is: it changes when the server restarts, fails over or is flushed.
local function epoch(c)
  redis.call('SET', key(c, 'epoch'), c.stamp, 'NX')
  local run_id = redis.call('INFO', 'server'):match('run_id:(%x+)')
  return run_id .. ':' .. redis.call('GET', key(c, 'epoch'))
end

local function see_worker(c, boot)
  redis.call('PEXPIRE', key(c, 'worker', boot), WORKER_TTL_MS)
  redis.call('PEXPIRE', key(c, 'mail', boot), MAIL_TTL_MS)
  redis.call('ZADD', key(c, 'workers'), c.stamp, boot)
end

-- boot, field, value, field, value... of its card -> nothing
local function register(keys, args)
  local c = enter(keys)
  local boot = table.remove(args, 1)
  redis.call('HSET', key(c, 'worker', boot), unpack(args))
  count(c, 1, 'registered', redis.call('HGET', key(c, 'worker', boot), 'role'))
  see_worker(c, boot)
  return {}
end

-- Give back every leg of this worker whose nonce is not listed.
local function give_back_unlisted(c, boot, listed)
  local legs = redis.call('HGETALL', key(c, 'legs', boot))
  for i = 1, #legs, 2 do
    if not listed[legs[i]] then
      local id, leg = legs[i + 1]:match('^(.*)/(%l+)$')
      give_back(c, read(c, id), leg, 'forgotten', 'requeued', leg)
    end
  end
end

-- boot -> rings
local function deregister(keys, args)
  local c = enter(keys)
  give_back_unlisted(c, args[1], {})
  redis.call('DEL', key(c, 'worker', args[1]), key(c, 'mail', args[1]))
  redis.call('ZREM', key(c, 'workers'), args[1])
  return c.rings
end

-- Why a worker does not own a leg that it believes in.
local function why_lost(r, leg)
  if not r then return 'unknown' end
  if TERMINAL[r.state] then return r.state end
  if leg == 'prefill' and r.state ~= 'queued' and r.state ~= 'prefill' then return 'done' end
  return r.requeue_why or 'requeued'
end

-- boot, load, lease_ms, holds (some with stamps) -> known, epoch, per hold (1, state, room state) or (0, why, ''), rings,
-- boots of the live workers
local function renew(keys, args)
  local c = enter(keys)
  local boot, lease_ms = args[1], tonumber(args[3])
  local known = redis.call('EXISTS', key(c, 'worker', boot))
  if known == 1 then
    redis.call('HSET', key(c, 'worker', boot), 'load', args[2])
    see_worker(c, boot)
  end
  local answers, listed, kept = {}, {}, 0
  for i, hold in ipairs(cjson.decode(args[4])) do
    listed[hold[4]] = true
    local r, leg = owned(c, hold)
    if r then
      redis.call('ZADD', key(c, 'lease'), later(c, lease_ms), r.id .. '/' .. leg)
      if hold[5] then write(c, r, { progress = hold[5] }) end
      if r.first_token and c.now - r.first_token > FORK_PATIENCE_MS then free_forks(c, r) end
      answers[i] = { 1, r.state, room_state(c, r) }
      kept = kept + 1
    else
      answers[i] = { 0, why_lost(read(c, hold[1]), hold[2]), '' }
    end
  end
  count(c, kept, 'lease', 'renewed')
  give_back_unlisted(c, boot, listed)
  return { known, epoch(c), answers, c.rings, redis.call('ZRANGE', key(c, 'workers'), 0, -1) }
end

-- -> each live worker's card
local function workers(keys)
  local c = enter(keys)
  local cards = {}
  for _, boot in ipairs(redis.call('ZRANGE', key(c, 'workers'), 0, -1)) do
    local card = redis.call('HGETALL', key(c, 'worker', boot))
    if #card > 0 then table.insert(cards, card) end
  end
  return cards
end

-- writer, room, asker -> nothing
local function ask(keys, args)
  local c = enter(keys)
  mail(c, args[1], 'event', 'ask', 'room', args[2], 'boot', args[3])
  return {}
end

-- room, asker -> nothing
local function settle(keys, args)
  local c = enter(keys)
  local room = key(c, 'room', args[1])
  if redis.call('HGET', room, 'state') == 'ended' then redis.call('DEL', room) end
  mail(c, args[2], 'event', 'settled', 'room', args[1])
  return {}
end

--- Events: reaper -----------------------------------------------------------------------------------------------

local function due(c, name)
  return redis.call('ZRANGEBYSCORE', key(c, name), '-inf', c.stamp, 'LIMIT', 0, REAP_BATCH)
end

-- While Redis was away no worker could renew. They get one whole lease to do so.
local function may_expire_leases(c, lease_ms)
  local reaper = key(c, 'reaper')
  local last, wait_until = unpack(redis.call('HMGET', reaper, 'last', 'wait_until'))
  if not last or c.now - last > lease_ms then
    wait_until = later(c, lease_ms)
    redis.call('HSET', reaper, 'wait_until', wait_until)
  end
  redis.call('HSET', reaper, 'last', c.stamp)
  return c.now >= tonumber(wait_until)
end

local function expire(c, r, leg, suspect_after)
  count(c, 1, 'lease', 'expired')
  if r.solo then
    return fail_request(c, r, 'crashed', 'The worker crashed while it ran this request alone.')
  end
  local attempt = r.attempt + 1
  write(c, r, { attempt = attempt })
  if attempt >= suspect_after then write(c, r, { solo = 1 }) end
  give_back(c, r, leg, 'expired', 'expired')
end

local function live_slots(c)
  local slots = { prefill = 0, decode = 0 }
  for _, boot in ipairs(redis.call('ZRANGE', key(c, 'workers'), 0, -1)) do
    local role, load = unpack(redis.call('HMGET', key(c, 'worker', boot), 'role', 'load'))
    local leg = role == 'decode' and 'decode' or 'prefill'
    if role then slots[leg] = slots[leg] + cjson.decode(load).slots end
  end
  return slots
end

-- A ring may be lost on its way. More rings than there is room for would help nobody.
local function ring_again(c, leg, slots, after_ms)
  if slots < 1 then return end
  local rung = FIELDS_OF[leg] .. 'rung'
  for _, id in ipairs(redis.call('ZRANGE', key(c, 'queue', leg), 0, math.min(slots, REAP_BATCH) - 1)) do
    if c.now - redis.call('HGET', key(c, 'req', id), rung) > after_ms then
      local r = read(c, id)
      write(c, r, { [rung] = c.stamp })
      ring(c, leg, r)
    end
  end
end

-- lease_ms, suspect_after, ring_after_ms -> rings, ids whose lease expired, ids that failed
local function reap(keys, args)
  local c = enter(keys)
  local expired, failed = {}, {}
  for _, id in ipairs(due(c, 'deadline')) do
    local r = read(c, id)
    if r and not TERMINAL[r.state] then fail_late(c, r) end  -- a fork may have ended with its leader
    if r and r.state == 'failed' then table.insert(failed, id) end
    redis.call('ZREM', key(c, 'deadline'), id)  -- of an end that a server replayed by half it is still here
  end
  if may_expire_leases(c, tonumber(args[1])) then
    for _, member in ipairs(due(c, 'lease')) do
      -- Ending one leg of a request may have ended the other.
      if redis.call('ZSCORE', key(c, 'lease'), member) then
        local id, leg = member:match('^(.*)/(%l+)$')
        local r = read(c, id)
        expire(c, r, leg, tonumber(args[2]))
        table.insert(TERMINAL[r.state] and failed or expired, id)
      end
    end
  end
  local slots = live_slots(c)
  ring_again(c, 'prefill', slots.prefill, tonumber(args[3]))
  ring_again(c, 'decode', slots.decode, tonumber(args[3]))
  for _, member in ipairs(due(c, 'ended')) do
    local id, owner = member:match('^([^/]*)/?(.*)$')  -- those of an earlier version name no owner
    redis.call('ZREM', key(c, 'ended'), member)
    redis.call('ZREM', key(c, 'requests'), id)
    redis.call('ZREM', key(c, 'owned', owner), id)
  end
  redis.call('ZREMRANGEBYSCORE', key(c, 'workers'), '-inf', ago(c, WORKER_TTL_MS))
  return { c.rings, expired, failed }
end

-- When memory is full only new requests are refused: all other events bring the open ones closer to their end.
local GROWS, MOVES, READS = {}, { 'allow-oom' }, { 'no-writes' }
local FUNCTIONS = {
  { 'submit', submit, GROWS },
  { 'claim', claim, MOVES },
  { 'claim_forks', claim_forks, MOVES },
  { 'cancel', cancel, MOVES },
  { 'publish', publish, MOVES },
  { 'kv_ready', kv_ready, MOVES },
  { 'note_scores', note_scores, MOVES },
  { 'emit', emit, MOVES },
  { 'release', release, MOVES },
  { 'fail', fail, MOVES },
  { 'register', register, MOVES },
  { 'renew', renew, MOVES },
  { 'deregister', deregister, MOVES },
  { 'ask', ask, MOVES },
  { 'settle', settle, MOVES },
  { 'reap', reap, MOVES },
  { 'take_traces', take_traces, MOVES },
  { 'drop_traces', drop_traces, MOVES },
  { 'record', record, READS },
  { 'timeline', timeline, READS },
  { 'earlier', earlier, READS },
  { 'published', published, READS },
  { 'waiting', waiting, READS },
  { 'backlog', backlog, READS },
  { 'list_requests', list_requests, READS },
  { 'workers', workers, READS },
}
for i = 1, #FUNCTIONS do  -- while it loads, a library has no ipairs
  local name, callback, flags = FUNCTIONS[i][1], FUNCTIONS[i][2], FUNCTIONS[i][3]
  redis.register_function { function_name = 'kvrelay_$PROTOCOL_' .. name, callback = callback, flags = flags }
end
