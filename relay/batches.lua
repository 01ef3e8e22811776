#!lua name=kvrelay_batches_$PROTOCOL

-- Batches of requests: one function per event, as in rooms.lua. KEYS[1] is the root of one model's keys.
--
-- <root>:batch:<id>            hash    the batch; `nonce` names the processor that works on it
-- <root>:batch:<id>:done       bitmap  numbers of the lines whose result is written
-- <root>:batch:<id>:<kind>     list    results that are in no part yet; a kind is output or errors
-- <root>:batch:<id>:<kind>:parts list  names of the parts, in storage, that hold the others
-- <root>:batches:<owner>       zset    the batches of one caller, by creation
-- <root>:open_batches          zset    those that have not ended, by the end of their lease
-- <root>:ended_batches         zset    those whose parts are still in storage, by when they ended
-- <root>:batch_key:<owner>:<key>  hash    batch id and body hash of an idempotency key

local KEPT_MS = 30 * 86400000   -- how long an ended batch can be read
local KEY_TTL_MS = 86400000
local KINDS = { 'output', 'errors' }

-- Raises where another version of kvrelay serves.
local function enter(keys)
  if redis.call('GET', keys[1] .. ':protocol') ~= '$PROTOCOL' then error('OTHER_PROTOCOL') end
  local time = redis.call('TIME')
  local now = time[1] * 1000 + time[2] / 1000
  return { root = keys[1], now = now, second = math.floor(now / 1000), stamp = string.format('%.3f', now) }
end

local function key(c, ...)
  return c.root .. ':' .. table.concat({ ... }, ':')
end

local function get(c, id, name)
  return redis.call('HGET', key(c, 'batch', id), name)
end

local function set(c, id, ...)
  redis.call('HSET', key(c, 'batch', id), ...)
end

local function whole(c, id)
  return redis.call('HGETALL', key(c, 'batch', id))
end

-- Is this caller the processor that works on the batch?
local function held(c, id, nonce)
  return get(c, id, 'nonce') == nonce and redis.call('ZSCORE', key(c, 'open_batches'), id)
end

local function enter_state(c, id, status)
  set(c, id, 'status', status, status .. '_at', c.second)
end

--- Events: gateway ----------------------------------------------------------------------------------------------

-- id, owner, window_s, idempotency key, body hash, field, value, field, value... -> outcome, the batch
local function create(keys, args)
  local c = enter(keys)
  local id, owner, window_s = args[1], args[2], args[3]
  local idempotency = args[4] ~= '' and key(c, 'batch_key', owner, args[4])
  local known = idempotency and redis.call('HMGET', idempotency, 'id', 'body') or { false, false }
  if known[1] and known[2] ~= args[5] then return { 'conflict', {} } end
  if known[1] then return { 'duplicate', whole(c, known[1]) } end
  if get(c, id, 'id') then return { 'new', whole(c, id) } end
  set(c, id, 'id', id, 'owner', owner, 'status', 'validating', 'created_at', c.second,
      'expires_at', c.second + window_s, 'completed', 0, 'failed', 0, unpack(args, 6))
  redis.call('ZREMRANGEBYSCORE', key(c, 'batches', owner), '-inf', c.now - 2 * KEPT_MS)
  redis.call('ZADD', key(c, 'batches', owner), c.stamp, id)
  redis.call('ZADD', key(c, 'open_batches'), 0, id)
  if idempotency then
    redis.call('HSET', idempotency, 'id', id, 'body', args[5])
    redis.call('PEXPIRE', idempotency, KEY_TTL_MS)
  end
  return { 'new', whole(c, id) }
end

-- id -> the batch, empty if there is none
local function find(keys, args)
  return whole(enter(keys), args[1])
end

-- owner, id or nothing, count -> so many batches behind the one with that id, newest first, or nil: there is no such one.
-- Those that are met and have expired leave the list, so each of them costs a read once.
local function list(keys, args)
  local c = enter(keys)
  local batches, count, place = key(c, 'batches', args[1]), tonumber(args[3]), 0
  if args[2] ~= '' then
    local before = redis.call('ZREVRANK', batches, args[2])
    if not before then return nil end
    place = before + 1
  end
  local found = {}
  while #found < count do
    local ids = redis.call('ZREVRANGE', batches, place, place + count - #found - 1)
    if #ids == 0 then break end
    for _, id in ipairs(ids) do
      local batch = whole(c, id)
      if #batch > 0 then
        found[#found + 1] = batch
        place = place + 1
      else
        redis.call('ZREM', batches, id)
      end
    end
  end
  return found
end

-- -> the batches that have not ended
local function open(keys)
  local c = enter(keys)
  local found = {}
  for i, id in ipairs(redis.call('ZRANGE', key(c, 'open_batches'), 0, -1)) do found[i] = whole(c, id) end
  return found
end

-- id -> the batch, empty if there is none. One that is being finalized, or has ended, stays as it is.
local function cancel(keys, args)
  local c = enter(keys)
  local status = get(c, args[1], 'status')
  if (status == 'validating' or status == 'in_progress') and not get(c, args[1], 'ending') then
    enter_state(c, args[1], 'cancelling')
  end
  return whole(c, args[1])
end

--- Events: processors -------------------------------------------------------------------------------------------

local function lease(c, id, lease_ms)
  redis.call('ZADD', key(c, 'open_batches'), string.format('%.3f', c.now + lease_ms), id)
end

-- nonce, lease_ms -> the oldest batch that nobody works on, or nil. A repeat is answered again.
local function claim(keys, args)
  local c = enter(keys)
  local first
  for _, id in ipairs(redis.call('ZRANGE', key(c, 'open_batches'), 0, -1)) do
    if get(c, id, 'nonce') == args[1] then return whole(c, id) end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key(c, 'open_batches'), '-inf', c.stamp)) do
    local created = tonumber(redis.call('ZSCORE', key(c, 'batches', get(c, id, 'owner')), id))
    if not first or created < first.created then first = { id = id, created = created } end
  end
  if not first then return nil end
  set(c, first.id, 'nonce', args[1])
  lease(c, first.id, args[2])
  return whole(c, first.id)
end

-- id, nonce, lease_ms -> status and seconds until it expires, or nil: another processor works on it, or it has ended
local function renew(keys, args)
  local c = enter(keys)
  if not held(c, args[1], args[2]) then return nil end
  lease(c, args[1], args[3])
  local status, expires = unpack(redis.call('HMGET', key(c, 'batch', args[1]), 'status', 'expires_at'))
  return { status, string.format('%.3f', expires - c.now / 1000) }
end

-- id, nonce -> nothing: another processor may go on at once
local function release(keys, args)
  local c = enter(keys)
  if held(c, args[1], args[2]) then
    redis.call('HDEL', key(c, 'batch', args[1]), 'nonce')
    redis.call('ZADD', key(c, 'open_batches'), 0, args[1])
  end
  return {}
end

-- Nothing but the record remains, and that for a while.
local function close(c, id, status)
  enter_state(c, id, status)
  redis.call('ZREM', key(c, 'open_batches'), id)
  redis.call('ZADD', key(c, 'ended_batches'), c.stamp, id)
  redis.call('DEL', key(c, 'batch', id, 'done'))
  for _, kind in ipairs(KINDS) do
    redis.call('DEL', key(c, 'batch', id, kind), key(c, 'batch', id, kind, 'parts'))
  end
  redis.call('PEXPIRE', key(c, 'batch', id), KEPT_MS)
end

-- id, nonce, errors as JSON -> ok
local function reject(keys, args)
  local c = enter(keys)
  if not held(c, args[1], args[2]) then return 0 end
  set(c, args[1], 'errors', args[3])
  close(c, args[1], 'failed')
  return 1
end

-- id, nonce, lines -> ok
local function start(keys, args)
  local c = enter(keys)
  if not held(c, args[1], args[2]) then return 0 end
  if get(c, args[1], 'status') == 'validating' then enter_state(c, args[1], 'in_progress') end
  set(c, args[1], 'total', args[3])
  return 1
end

-- id -> the bitmap of the lines that are written
local function done(keys, args)
  return redis.call('GET', key(enter(keys), 'batch', args[1], 'done')) or ''
end

-- id, nonce, line, kind, result, input, cached and output tokens -> bytes of this kind in no part, or -1: not ours
local function write(keys, args)
  local c = enter(keys)
  local id, line, kind, result = args[1], args[3], args[4], args[5]
  if not held(c, id, args[2]) or get(c, id, 'ending') then return -1 end
  local batch = key(c, 'batch', id)
  if redis.call('SETBIT', key(c, 'batch', id, 'done'), line, 1) == 0 then
    redis.call('RPUSH', key(c, 'batch', id, kind), result)
    redis.call('HINCRBY', batch, kind .. '_bytes', #result)
    redis.call('HINCRBY', batch, kind == 'output' and 'completed' or 'failed', 1)
    for i, name in ipairs({ 'input_tokens', 'cached_tokens', 'output_tokens' }) do
      redis.call('HINCRBY', batch, name, args[5 + i])
    end
  end
  return tonumber(redis.call('HGET', batch, kind .. '_bytes') or 0)
end

-- id, kind -> the results that are in no part
local function pending(keys, args)
  return redis.call('LRANGE', key(enter(keys), 'batch', args[1], args[2]), 0, -1)
end

-- id, kind -> the names of the parts
local function parts(keys, args)
  return redis.call('LRANGE', key(enter(keys), 'batch', args[1], args[2], 'parts'), 0, -1)
end

-- id, nonce, kind, part, results in it -> ok. They were the oldest of those in no part.
local function spill(keys, args)
  local c = enter(keys)
  local id, kind = args[1], args[3]
  if not held(c, id, args[2]) then return 0 end
  local names, results = key(c, 'batch', id, kind, 'parts'), key(c, 'batch', id, kind)
  if redis.call('LINDEX', names, -1) == args[4] then return 1 end
  local bytes = 0
  for _, result in ipairs(redis.call('LRANGE', results, 0, args[5] - 1)) do bytes = bytes + #result end
  redis.call('RPUSH', names, args[4])
  redis.call('LTRIM', results, args[5], -1)
  redis.call('HINCRBY', key(c, 'batch', id), kind .. '_bytes', -bytes)
  return 1
end

-- id, nonce, ending, output file id, error file id -> the batch, or empty: not ours. From here on nothing is written.
local function finalize(keys, args)
  local c = enter(keys)
  local id, ending = args[1], args[3]
  if not held(c, id, args[2]) then return {} end
  if not get(c, id, 'ending') then
    if get(c, id, 'status') == 'cancelling' then ending = 'cancelled' end
    set(c, id, 'ending', ending)
    if tonumber(get(c, id, 'completed')) > 0 then set(c, id, 'output_file_id', args[4]) end
    if tonumber(get(c, id, 'failed')) > 0 then set(c, id, 'error_file_id', args[5]) end
    if ending == 'completed' then enter_state(c, id, 'finalizing') end
  end
  return whole(c, id)
end

-- id, nonce -> ok
local function finish(keys, args)
  local c = enter(keys)
  if not held(c, args[1], args[2]) then return 0 end
  close(c, args[1], get(c, args[1], 'ending'))
  return 1
end

-- age_ms -> batches that ended so long ago and whose parts were not deleted
local function unswept(keys, args)
  local c = enter(keys)
  return redis.call('ZRANGEBYSCORE', key(c, 'ended_batches'), '-inf', string.format('%.3f', c.now - args[1]))
end

-- id -> nothing: its parts are deleted
local function swept(keys, args)
  redis.call('ZREM', key(enter(keys), 'ended_batches'), args[1])
  return {}
end

-- When memory is full only new batches are refused.
local GROWS, MOVES, READS = {}, { 'allow-oom' }, { 'no-writes' }
local FUNCTIONS = {
  { 'create', create, GROWS },
  { 'cancel', cancel, MOVES },
  { 'claim', claim, MOVES },
  { 'renew', renew, MOVES },
  { 'release', release, MOVES },
  { 'reject', reject, MOVES },
  { 'start', start, MOVES },
  { 'write', write, GROWS },
  { 'spill', spill, MOVES },
  { 'finalize', finalize, MOVES },
  { 'finish', finish, MOVES },
  { 'swept', swept, MOVES },
  { 'list', list, MOVES },
  { 'find', find, READS },
  { 'open', open, READS },
  { 'done', done, READS },
  { 'pending', pending, READS },
  { 'parts', parts, READS },
  { 'unswept', unswept, READS },
}
for i = 1, #FUNCTIONS do  -- while it loads, a library has no ipairs
  local name, callback, flags = FUNCTIONS[i][1], FUNCTIONS[i][2], FUNCTIONS[i][3]
  redis.register_function { function_name = 'kvrelay_batches_$PROTOCOL_' .. name, callback = callback, flags = flags }
end
