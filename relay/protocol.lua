-- May a process of this version be here? Run as a script, since each version has functions of its own; what it reads
-- means the same in all of them. KEYS[1] is the root of one model's keys, `:protocol` the number that its processes speak.
--
-- own number, oldest number whose records it reads, `start`, `run` or `look` -> what stands against it or '', the number
-- found, how many

local root, own, oldest, how = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local WORKER_TTL_MS = 10000

local held = redis.call('GET', root .. ':protocol')
if held == ARGV[1] then return { '', own, 0 } end
local found = tonumber(held or 1)  -- the versions before there were numbers

local time = redis.call('TIME')
local seen_since = string.format('%.0f', time[1] * 1000 - WORKER_TTL_MS)
local workers = redis.call('ZCOUNT', root .. ':workers', seen_since, '+inf')
if workers > 0 then return { 'workers', found, workers } end
if held and how == 'run' then return { 'newcomer', found, 0 } end  -- it began when nobody of this version worked

local open = redis.call('ZCARD', root .. ':deadline') + redis.call('ZCARD', root .. ':open_batches')
if open > 0 and (found > own or found < oldest) then return { 'open', found, open } end
if how ~= 'look' then redis.call('SET', root .. ':protocol', ARGV[1]) end
return { '', found, 0 }
