-- control.lua: registers an instance among those that share the store, tells it
-- the switches and overrides of the fleet if it does not know them, and changes
-- them for it, if they still are what it has seen.
--
-- KEYS[1]   <prefix>{control}             hash: "id" of the state, "state" as JSON
-- KEYS[2]   <prefix>{control}:instances   sorted set of instances, score = us at which one is dropped
-- KEYS[3]   <prefix>{control}:secrets     sorted set of fingerprints of key_secret, likewise
-- ARGV[1] deadline     us of server time; from then on nothing is written; 0: none
-- ARGV[2] instance     id; empty: registers nobody
-- ARGV[3] leave        1: forget the instance, 0: register it
-- ARGV[4] secret       fingerprint of its key_secret
-- ARGV[5] known        id of the state that it knows; empty: none
-- ARGV[6] stored       id of the state that it has seen here; empty: none
-- ARGV[7] id           of the state to put in its place; empty: none
-- ARGV[8] state        that it is
-- Returns integers and, at the end, two texts:
--   reply[1] now         us; alone if nothing was written because it was too late
--   reply[2] beat        us between calls; eight without one and the instance is dropped
--   reply[3] instances   that live
--   reply[4] secrets     that they have: 1 unless they differ
--   reply[5] id          of the state that is here now; empty: none
--   reply[6] state       that it is, unless it is the known one
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2] -- us
local deadline = tonumber(ARGV[1])      -- us
if deadline > 0 and now >= deadline then return {now} end

local life = 34560000000 -- ms, 400 days: longer than anything is in force

local function live(key) -- how many members have not been dropped
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  return redis.call('ZCARD', key)
end
if ARGV[3] == '1' then
  redis.call('ZREM', KEYS[2], ARGV[2])
end
local instances = live(KEYS[2])
local beat = math.max(250000, instances * 4000) -- us
local ends = now + 8 * beat
if ARGV[3] == '0' and ARGV[2] ~= '' then
  if redis.call('ZADD', KEYS[2], ends, ARGV[2]) == 1 then
    instances = instances + 1
    redis.call('PEXPIRE', KEYS[2], life) -- not at each beat, for that costs a tenth of it
  end
  if redis.call('ZADD', KEYS[3], ends, ARGV[4]) == 1 then redis.call('PEXPIRE', KEYS[3], life) end
end

local id = redis.call('HGET', KEYS[1], 'id') or ''
if ARGV[7] ~= '' and id == ARGV[6] then
  id = ARGV[7]
  redis.call('HSET', KEYS[1], 'id', id, 'state', ARGV[8])
  redis.call('PEXPIRE', KEYS[1], life)
end
local state = ''
if id ~= ARGV[5] and id ~= ARGV[7] then state = redis.call('HGET', KEYS[1], 'state') or '' end
return {now, beat, instances, live(KEYS[3]), id, state}
