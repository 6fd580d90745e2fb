-- admit.lua: decides every bucket and every concurrency limit of one identity
-- at once. If an enforced one denies, nothing is taken. A dark one is decided
-- against the enforced ones and itself alone.
--
-- KEYS, first one for each bucket, then one for each concurrency limit:
--   <prefix><pool>:{<identity>}:r:<limit>:<period>   string "level at"
--   <prefix><pool>:{<identity>}:c:<limit>            sorted set of leases, score = end in us
-- ARGV[1] deadline   us of server time; from then on nothing is decided
-- ARGV[2] buckets    how many of KEYS are buckets
-- ARGV[3] id         of the leases to take, to be followed by their length in us
-- for each bucket:
--   bucket[1] refill     units a tick; a token is as many units as its period has ticks
--   bucket[2] capacity   units
--   bucket[3] cost       units
--   bucket[4] tick       us, 1 or 1000: the resolution of "at"
--   bucket[5] dark       1 or 0
-- for each concurrency limit:
--   slot[1] capacity     leases
--   slot[2] lease        us, at most an hour
--   slot[3] dark         1 or 0
--   slot[4] ended        how many leases of this key follow that have ended
-- Returns integers:
--   reply[1] now         us; alone if the deadline has passed
-- then for each key:
--   answer[1] outcome    0 denied, 1 allowed, 2 not evaluated
--   answer[2] level      units left, or leases live, after this request

-- Half of its time is not that of the commands: a string in arithmetic is a number
-- without a call of tonumber, and a table that grows costs as much as a command.
local call, floor, fmod = redis.call, math.floor, math.fmod
local time = call('TIME')
local now = time[1] * 1000000 + time[2] -- us
if now >= ARGV[1] + 0 then return {now} end

local buckets = ARGV[2] + 0
local arg = 4
local allowed = true
local level, clock, fits, behind = {nil, nil}, {nil, nil}, {nil, nil}, {nil, nil} -- room for two

for i = 1, buckets do
  local refill, capacity, cost = ARGV[arg] + 0, ARGV[arg + 1] + 0, ARGV[arg + 2] + 0
  clock[i] = floor(now / ARGV[arg + 3])
  level[i] = capacity
  local stored = call('GET', KEYS[i])
  if stored then
    local old, at = string.match(stored, '^(%d+) (%d+)$')
    if old then
      at = tonumber(at)
      behind[i] = clock[i] < at -- the server's clock was set back
      level[i] = math.min(capacity, tonumber(old) + math.max(0, clock[i] - at) * refill)
    end
  end
  fits[i] = level[i] >= cost
  if not fits[i] and ARGV[arg + 4] == '0' then allowed = false end
  arg = arg + 5
end

local slots = arg
for i = buckets + 1, #KEYS do
  local capacity, lease, ended = ARGV[arg] + 0, ARGV[arg + 1] + 0, ARGV[arg + 3] + 0
  if ended > 0 then call('ZREM', KEYS[i], unpack(ARGV, arg + 4, arg + 3 + ended)) end
  level[i] = call('ZCOUNT', KEYS[i], now, '+inf')
  fits[i] = level[i] < capacity
  if not fits[i] then
    -- Those that have ended do not count, but when many crash they are many.
    call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now - 1)
    -- An end that is further away than its lease is long is of a clock that was set back.
    local far = call('ZRANGEBYSCORE', KEYS[i], now + lease + 1, '+inf', 'WITHSCORES')
    for j = 1, #far, 2 do
      local latest = now + (tonumber(string.match(far[j], '%d+$')) or lease)
      if tonumber(far[j + 1]) > latest then call('ZADD', KEYS[i], latest, far[j]) end
    end
    if ARGV[arg + 2] == '0' then allowed = false end
  end
  arg = arg + 4 + ended
end

local reply = {now, nil, nil, nil, nil}
arg = 4
for i = 1, buckets do
  local refill, capacity, tick = ARGV[arg] + 0, ARGV[arg + 1] + 0, ARGV[arg + 3] + 0
  local take = allowed and fits[i]
  if take then level[i] = level[i] - ARGV[arg + 2] end
  if take or behind[i] then
    local missing = capacity - level[i]
    local full = (missing - fmod(missing, refill)) / refill -- ticks, rounded down
    local ms = 1000 / tick                                       -- ticks a millisecond
    call('SET', KEYS[i], string.format('%.0f %.0f', level[i], clock[i]),
      'PX', (full - fmod(full, ms)) / ms + 2)
  end
  reply[#reply + 1] = (allowed or ARGV[arg + 4] == '0') and (fits[i] and 1 or 0) or 2
  reply[#reply + 1] = level[i]
  arg = arg + 5
end

arg = slots
for i = buckets + 1, #KEYS do
  if allowed and fits[i] then
    call('ZADD', KEYS[i], now + ARGV[arg + 1], ARGV[3] .. ARGV[arg + 1])
    call('PEXPIRE', KEYS[i], '3600002') -- after the longest lease of all
    level[i] = level[i] + 1
  end
  reply[#reply + 1] = (allowed or ARGV[arg + 2] == '0') and (fits[i] and 1 or 0) or 2
  reply[#reply + 1] = level[i]
  arg = arg + 4 + ARGV[arg + 3]
end
return reply
