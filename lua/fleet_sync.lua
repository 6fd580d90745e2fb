-- fleet_sync.lua: takes down what one instance of a fleet does and what claim on
-- the slots for non-critical requests it has, and grants it more if there is
-- room. All numbers are absolute, so a sync that was lost is healed by the next.
-- No grant takes the sum of all claims above the allocation.
--
-- KEYS[1]   <prefix>{<pool>}:fleet        hash: one entry an instance, "seq claim in_flight critical workers";
--                                         their totals; the configuration in force; times in us
-- KEYS[2]   <prefix>{<pool>}:fleet:ends   sorted set of instances, score = us at which one is dropped
-- ARGV[1] instance     id, 32 hexadecimal digits
-- ARGV[2] seq          rises with every sync of the instance; older ones are ignored
-- ARGV[3] deadline     us of server time; from then on nothing is written; 0: none
-- ARGV[4] leave        1: forget the instance, 0: all that follows
-- ARGV[5] epoch        of the state that the instance knows; 0: none yet
-- ARGV[6] held         its claim; lowered before this sync if it is to be lowered
-- ARGV[7] need         claim that its requests, in progress and waiting, need
-- ARGV[8] wanted       claim that it would like: need and headroom; at least held
-- ARGV[9] sum          of all claims, as it was last told; 0 if its claim has ended since
-- ARGV[10] in_flight   non-critical requests in progress
-- ARGV[11] critical    critical requests in progress
-- ARGV[12] workers     how many requests it can serve at once
-- ARGV[13] generation  of its configuration; 0: new, to be the newest
-- ARGV[14] capacity    requests fleet-wide; 0: auto, the sum of the workers
-- ARGV[15] reserve     for critical requests, hundredths of a percent
-- ARGV[16] known       capacity that it was last told; 0: none yet
-- Returns integers:
--   reply[1] now          us; alone if nothing was written: too late, or an old seq
--   reply[2] claim        of the instance
--   reply[3] limit        up to which to use it: lower if it has to give some of it up
--   reply[4] beat         us between syncs; eight without one and the instance is dropped
--   reply[5] hold         us to wait before asking again, if need was not met
--   reply[6] epoch        us, when this state began
--   reply[7] generation   of the configuration in force
--   reply[8] capacity     in force
--   reply[9] allocation   slots for non-critical requests
--   reply[10] claims      sum over the instances, as the rest
--   reply[11] in_flight
--   reply[12] critical
--   reply[13] workers
--   reply[14] instances
--   reply[15] drift       by how much totals that were rebuilt now had been wrong
--   reply[16] warm        1: state was lost a moment ago; what others may still hold is kept for them
local time = redis.call('TIME')
local now        = time[1] * 1000000 + time[2] -- us
local id         = ARGV[1]
local seq        = tonumber(ARGV[2])
local deadline   = tonumber(ARGV[3])  -- us
local leave      = ARGV[4] == '1'
local epoch      = tonumber(ARGV[5])  -- us
local held       = tonumber(ARGV[6])
local need       = tonumber(ARGV[7])
local wanted     = tonumber(ARGV[8])
local sum        = tonumber(ARGV[9])
local in_flight  = tonumber(ARGV[10])
local critical   = tonumber(ARGV[11])
local workers    = tonumber(ARGV[12])
local generation = tonumber(ARGV[13])
local capacity   = tonumber(ARGV[14])
local reserve    = tonumber(ARGV[15]) -- hundredths of a percent
local known      = tonumber(ARGV[16])

local totals = {'claims', 'in_flight', 'critical', 'workers', 'instances'}
local fields = {'epoch', 'at', 'rebuilt', 'warm', 'lost', 'poor', 'poor_at', 'missing', 'generation', 'capacity',
  'reserve', 'auto', 'auto_at', 'auto_max', 'claims', 'in_flight', 'critical', 'workers', 'instances'}

local function entry(text) -- nil if there is none
  local n, c, i, cr, w = string.match(text or '', '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
  return n and {seq = tonumber(n), claims = tonumber(c), in_flight = tonumber(i), critical = tonumber(cr),
    workers = tonumber(w), instances = 1}
end
local function add(sums, e, sign)
  for i = 1, #totals do sums[totals[i]] = sums[totals[i]] + sign * e[totals[i]] end
end

-- Spelled out, for this runs often: unpack takes as long as Redis, and a table that
-- a loop fills grows six times.
local stored = redis.call('HMGET', KEYS[1], id, 'epoch', 'at', 'rebuilt', 'warm', 'lost', 'poor', 'poor_at', 'missing',
  'generation', 'capacity', 'reserve', 'auto', 'auto_at', 'auto_max', 'claims', 'in_flight', 'critical', 'workers',
  'instances')
local own = entry(stored[1])
for i = 1, #fields do stored[i] = tonumber(stored[i + 1]) or 0 end
local s = {epoch = stored[1], at = stored[2], rebuilt = stored[3], warm = stored[4], lost = stored[5], poor = stored[6],
  poor_at = stored[7], missing = stored[8], generation = stored[9], capacity = stored[10], reserve = stored[11],
  auto = stored[12], auto_at = stored[13], auto_max = stored[14], claims = stored[15], in_flight = stored[16],
  critical = stored[17], workers = stored[18], instances = stored[19]}
if (deadline > 0 and now >= deadline) or (own and own.seq >= seq) then return {now} end

local function beat() return math.max(250000, s.instances * 1000) end -- us
local function hold() return math.max(10000, s.instances * 750) end  -- us
local life = now + 8 * beat()

-- Totals are rebuilt from the entries now and then, and at once when the sorted
-- set was lost or the clock was set back: no end may be later than life.
local drift, expire = 0, not own
if s.epoch == 0 then
  redis.call('DEL', KEYS[1], KEYS[2])
  own = nil
  for i = 1, #fields do s[fields[i]], stored[i] = 0, 0 end
  s.epoch, s.rebuilt = now, now
elseif now < s.at or now - s.rebuilt >= 10000000 or redis.call('ZCARD', KEYS[2]) ~= s.instances then
  expire = true
  local ends, sums = {}, {}
  local scores, all = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'), redis.call('HGETALL', KEYS[1])
  for i = 1, #scores, 2 do ends[scores[i]] = tonumber(scores[i + 1]) end
  for _, name in ipairs(totals) do sums[name] = 0 end
  redis.call('DEL', KEYS[2])
  for i = 1, #all, 2 do
    local e = #all[i] == 32 and entry(all[i + 1])
    if e then
      add(sums, e, 1)
      redis.call('ZADD', KEYS[2], math.min(ends[all[i]] or life, life), all[i])
    end
  end
  for _, name in ipairs(totals) do
    drift = drift + math.abs(sums[name] - s[name])
    s[name] = sums[name]
  end
  s.rebuilt, s.auto_at, s.poor_at = now, math.min(s.auto_at, now), 0
  s.warm = math.min(s.warm, now + 2 * beat())
end

local function drop(instance, e)
  if e then add(s, e, -1) end
  redis.call('HDEL', KEYS[1], instance)
  redis.call('ZREM', KEYS[2], instance)
end
local overdue = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 33)
for i = 1, math.min(32, #overdue) do
  if overdue[i] == id then
    drop(id, own)
    own = nil
  else
    drop(overdue[i], entry(redis.call('HGET', KEYS[1], overdue[i])))
  end
end

-- Somebody who remembers what is not here shows that state was lost: by
-- FLUSHALL, or by a failover to a replica that lagged behind.
local before = own and own.claims or 0
local other = epoch > 0 and epoch ~= s.epoch and now - s.epoch < 8 * beat()
if other then s.auto, s.auto_at = math.max(s.auto, known), now end
if other or held > before then
  if now - s.warm > 8 * beat() then s.warm, s.lost = now + 2 * beat(), 0 end
  s.lost = math.max(s.lost, sum)
end

if own then add(s, own, -1) end
local base = math.min(held, before) -- it has no more, whatever it was granted in replies that it lost
if leave then
  if own then drop(id) end
else
  add(s, {claims = base, in_flight = in_flight, critical = critical, workers = workers, instances = 1}, 1)
  if generation == 0 and (s.generation == 0 or s.capacity ~= capacity or s.reserve ~= reserve) then
    generation = math.max(now, s.generation + 1)
  end
  if generation > s.generation then
    s.generation, s.capacity, s.reserve = generation, capacity, reserve
  end
end

-- The sum of the workers rises at once, and falls to the most there were in ten
-- seconds in which there were always fewer.
if s.workers >= s.auto then
  s.auto, s.auto_at, s.auto_max = s.workers, 0, 0
else
  if s.auto_at == 0 then s.auto_at = now end -- since when there are fewer
  s.auto_max = math.max(s.auto_max, s.workers)
  if now - s.auto_at >= 10000000 then s.auto, s.auto_at, s.auto_max = s.auto_max, now, s.workers end
end
if s.capacity > 0 then capacity = s.capacity else capacity = s.auto end -- in force
local allocation = math.floor(capacity * (10000 - s.reserve) / 10000)

local write = {}
local claim, limit = 0, 0
if not leave then
  claim = base
  s.lost = s.lost - (before - base)
  -- An instance that lacks slots is poor, one that has at least two more is rich:
  -- for a while the rich do not grow, and give up what the poor is missing, at
  -- most an eighth of what is between them at a time.
  local contended = now - s.poor_at <= 2 * hold()
  local rich = contended and base > s.poor + 1
  if #overdue <= 32 then
    -- It gets back what it held. Beyond that, what is needed may fill the
    -- allocation, and headroom four fifths of it; during the two beats after a
    -- loss, lost counts what all held and what was granted since.
    claim = math.max(base, math.min(held, base + allocation - s.claims))
    local taken = s.claims + claim - base
    if now < s.warm then taken = math.max(taken, s.lost) end
    local room = math.max(0, allocation - taken)
    local spare = math.max(0, math.floor(allocation * 4 / 5) - taken)
    if not rich then
      local granted = math.max(claim, math.min(need, claim + room), math.min(wanted, claim + spare))
      s.lost = s.lost + granted - claim
      claim = granted
    end
  end
  if claim < need and (claim <= s.poor or not contended) then
    s.poor, s.poor_at, s.missing = claim, now, need - claim
  end
  s.claims = s.claims + claim - base
  limit = claim
  if s.claims > allocation then
    limit = math.floor(claim * allocation / s.claims)
  elseif rich then
    limit = claim - math.max(1, math.min(s.missing, math.floor((claim - s.poor) / 8)))
  end
  write = {id, string.format('%.0f %.0f %.0f %.0f %.0f', seq, claim, in_flight, critical, workers)}
  redis.call('ZADD', KEYS[2], now + 8 * beat(), id)
end

s.at = now
for i = 1, #fields do
  local value = s[fields[i]]
  if value ~= stored[i] then
    write[#write + 1] = fields[i]
    write[#write + 1] = value
  end
end
redis.call('HSET', KEYS[1], unpack(write))
if expire then
  for i = 1, 2 do redis.call('PEXPIRE', KEYS[i], 60000 + 8 * beat() / 1000) end
end
return {now, claim, limit, beat(), hold(), s.epoch, s.generation, capacity, allocation,
  s.claims, s.in_flight, s.critical, s.workers, s.instances, drift, now < s.warm and 1 or 0}
