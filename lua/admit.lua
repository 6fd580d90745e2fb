-- admit.lua: decides every bucket and every concurrency limit of one identity at
-- once, and so for each of several identities whose limits are the same. If an
-- enforced one denies, nothing is taken from the identity. A dark one is decided
-- against the enforced ones and itself alone.
--
-- KEYS for each identity, first one for each bucket, then one for each concurrency limit:
--   <prefix><pool>:{<identity>}:r:<limit>:<period>   string "level at"
--   <prefix><pool>:{<identity>}:c:<limit>            sorted set of leases, score = end in us
-- ARGV[1] identities   how many
-- ARGV[2] buckets      how many of the keys of an identity are buckets
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
-- for each identity:
--   ask[1] deadline      us of server time; from then on nothing is decided
--   for each concurrency limit:
--     turn[1] member     the lease to take, whose name ends with its length in us
--     turn[2] ended      how many leases of its key follow that have ended, and go in
--                        any case: later asks about the identity rely on it
-- Returns integers:
--   reply[1] now         us
-- then for each identity and each of its keys:
--   answer[1] outcome    0 denied, 1 allowed, 2 not evaluated; for all keys of an identity
--                        and with nothing taken: 3 too late, 4 a key of another type
--   answer[2] level      units left, or leases live, after this request

-- Half of its time is not that of the commands: a string in arithmetic is a number
-- without a call of tonumber, a table that grows costs as much as a command, and a
-- number that is an argument of one is written with 17 digits first, so those which
-- all identities have in common are written once.
local KEYS, ARGV = KEYS, ARGV
local call, try, floor, fmod, match, format = redis.call, redis.pcall, math.floor, math.fmod, string.match, string.format
local time = call('TIME')
local now = time[1] * 1000000 + time[2] -- us
local buckets = ARGV[2] + 0
local limits = #KEYS / ARGV[1] -- of an identity

local refill, capacity, cost, tick, dark = {nil}, {nil, nil}, {nil}, {nil}, {nil, nil} -- room for what is usual
local clock, lease = {nil}, {nil, nil}
local at, ends, from = {nil}, {nil, nil}, format('%.0f', now) -- as texts
local arg = 3
for i = 1, buckets do
  refill[i], capacity[i], cost[i] = ARGV[arg] + 0, ARGV[arg + 1] + 0, ARGV[arg + 2] + 0
  tick[i], dark[i] = ARGV[arg + 3], ARGV[arg + 4] == '1'
  clock[i] = floor(now / tick[i])
  at[i] = format(' %.0f', clock[i])
  arg = arg + 5
end
for i = buckets + 1, limits do
  capacity[i], lease[i], dark[i] = ARGV[arg] + 0, ARGV[arg + 1], ARGV[arg + 2] == '1'
  ends[i] = format('%.0f', now + lease[i])
  arg = arg + 3
end

local reply, n = {now, nil, nil, nil, nil}, 1
local level, fits, behind, member = {nil, nil}, {nil, nil}, {nil}, {nil, nil}

for key = 0, #KEYS - 1, limits do -- the one before the identity's first
  local failed = now >= ARGV[arg] + 0 and 3 or nil
  local allowed = true
  arg = arg + 1

  for i = 1, failed and 0 or buckets do
    level[i], behind[i] = capacity[i], false
    local stored = try('GET', KEYS[key + i])
    if stored and stored.err then
      if not match(stored.err, '^WRONGTYPE') then return stored end
      failed = 4
    elseif stored then
      local old, since = match(stored, '^(%d+) (%d+)$')
      if old then
        local elapsed = clock[i] - since
        behind[i] = elapsed < 0 -- the server's clock was set back
        if behind[i] then elapsed = 0 end
        local refilled = old + elapsed * refill[i]
        if refilled < capacity[i] then level[i] = refilled end
      end
    end
    fits[i] = level[i] >= cost[i]
    if not fits[i] and not dark[i] then allowed = false end
  end

  for i = buckets + 1, limits do
    local ended = ARGV[arg + 1] + 0
    local removed = ended > 0 and try('ZREM', KEYS[key + i], unpack(ARGV, arg + 2, arg + 1 + ended))
    -- One who is denied writes nothing else that would fail, and they would be forgotten.
    if type(removed) == 'table' and not match(removed.err, '^WRONGTYPE') then return removed end
    if not failed then
      local live = try('ZCOUNT', KEYS[key + i], from, '+inf')
      if type(live) == 'table' then
        if not match(live.err, '^WRONGTYPE') then return live end
        failed, live = 4, 0
      end
      level[i], fits[i], member[i] = live, live < capacity[i], ARGV[arg]
      if not fits[i] then
        -- Those that have ended do not count, but when many crash they are many.
        call('ZREMRANGEBYSCORE', KEYS[key + i], '-inf', now - 1)
        -- An end that is further away than its lease is long is of a clock that was set back.
        local far = call('ZRANGEBYSCORE', KEYS[key + i], now + lease[i] + 1, '+inf', 'WITHSCORES')
        for j = 1, #far, 2 do
          local latest = now + (tonumber(match(far[j], '%d+$')) or lease[i])
          if tonumber(far[j + 1]) > latest then call('ZADD', KEYS[key + i], latest, far[j]) end
        end
        if not dark[i] then allowed = false end
      end
    end
    arg = arg + 2 + ended
  end

  for i = 1, limits do
    local outcome, left = failed, 0
    if not failed then
      left = level[i]
      if allowed or not dark[i] then outcome = fits[i] and 1 or 0 else outcome = 2 end
      local take = allowed and fits[i]
      if i > buckets then
        if take then
          call('ZADD', KEYS[key + i], ends[i], member[i])
          call('PEXPIRE', KEYS[key + i], '3600002') -- after the longest lease of all
          left = left + 1
        end
      elseif take or behind[i] then
        if take then left = left - cost[i] end
        local missing = capacity[i] - left
        local full = (missing - fmod(missing, refill[i])) / refill[i] -- ticks, rounded down
        local ms = 1000 / tick[i]                                     -- ticks a millisecond
        call('SET', KEYS[key + i], format('%.0f', left) .. at[i], 'PX', (full - fmod(full, ms)) / ms + 2)
      end
    end
    reply[n + 1], reply[n + 2] = outcome, left
    n = n + 2
  end
end
return reply
