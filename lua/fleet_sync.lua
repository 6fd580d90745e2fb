-- fleet_sync.lua: takes down what one instance of a fleet does and what claim on
-- the slots for non-critical requests it has, and grants it more if there is
-- room. All numbers are absolute, so a sync that was lost is healed by the next.
-- No grant takes the sum of all claims above the allocation.
--
-- KEYS[1]   <prefix>{<pool>}:fleet   hash: one field an instance, "seq claim in_flight critical workers ends";
--                                    and "state", all other numbers, in one text to be read and written at once
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
-- The numbers of the state, times in us:
--   state[1] began          when it did: its epoch
--   state[2] at             the last sync
--   state[3] sweep          when to look through the instances; none ends before
--   state[4] warm           until then, what others may still hold is kept for them
--   state[5] lost           which is so much, with what was granted since
--   state[6] poor           claim of the instance that lacks slots
--   state[7] poor_at        when it said so
--   state[8] missing        how many
--   state[9] newest         generation of the configuration in force
--   state[10] fixed         its capacity
--   state[11] kept          its reserve
--   state[12] auto          capacity if that is auto
--   state[13] auto_at       since when there have been fewer workers; 0: there are not
--   state[14] auto_max      the most there were since
--   state[15] claims        sum over the instances, as the rest
--   state[16] all_in_flight
--   state[17] all_critical
--   state[18] all_workers
--   state[19] instances
local call, match, format = redis.call, string.match, string.format
local max, min, floor, abs = math.max, math.min, math.floor, math.abs
local time = call('TIME')
local now        = time[1] * 1000000 + time[2] -- us
local id         = ARGV[1]
local seq        = ARGV[2] + 0 -- a number, without a call of tonumber
local deadline   = ARGV[3] + 0  -- us
local leave      = ARGV[4] == '1'
local epoch      = ARGV[5] + 0  -- us
local held       = ARGV[6] + 0
local need       = ARGV[7] + 0
local wanted     = ARGV[8] + 0
local sum        = ARGV[9] + 0
local in_flight  = ARGV[10] + 0
local critical   = ARGV[11] + 0
local workers    = ARGV[12] + 0
local generation = ARGV[13] + 0
local capacity   = ARGV[14] + 0
local reserve    = ARGV[15] + 0 -- hundredths of a percent
local known      = ARGV[16] + 0

-- This runs often, and tables and commands are what it costs: so the state is one
-- text in Redis, and variables here.
local ENTRY = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$'
local STATE = '^(%d+) (%d+) (%d+) (%d+) (-?%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)' ..
  ' (-?%d+) (-?%d+) (-?%d+) (-?%d+) (-?%d+)$'
local stored = call('HMGET', KEYS[1], id, 'state')
local own, own_claim, own_in_flight, own_critical, own_workers = match(stored[1] or '', ENTRY) -- nil if there is none
if (deadline > 0 and now >= deadline) or (own and own + 0 >= seq) then return {now} end

local began, at, sweep, warm, lost, poor, poor_at, missing, newest, fixed, kept, auto, auto_at, auto_max,
  claims, all_in_flight, all_critical, all_workers, instances = match(stored[2] or '', STATE)
local fresh = not began
if fresh then -- or nobody can read what there is
  call('DEL', KEYS[1])
  own = nil
  began, at, sweep, warm, lost, poor, poor_at, missing = now, now, now + 2000000, 0, 0, 0, 0, 0
  newest, fixed, kept, auto, auto_at, auto_max = 0, 0, 0, 0, 0, 0
  claims, all_in_flight, all_critical, all_workers, instances = 0, 0, 0, 0, 0
else
  began, at, sweep, warm, lost, poor, poor_at, missing =
    began + 0, at + 0, sweep + 0, warm + 0, lost + 0, poor + 0, poor_at + 0, missing + 0
  newest, fixed, kept, auto, auto_at, auto_max = newest + 0, fixed + 0, kept + 0, auto + 0, auto_at + 0, auto_max + 0
  claims, all_in_flight, all_critical, all_workers, instances =
    claims + 0, all_in_flight + 0, all_critical + 0, all_workers + 0, instances + 0
end
local function beat() return max(250000, instances * 1500) end -- us
local function hold() return max(10000, instances * 1500) end -- us

-- Instances that have ended are dropped and the totals rebuilt when one may have
-- ended, at most four times a beat. If the clock was set back, no end may be later
-- than life.
local drift, expire = 0, not own
if now < at or now >= sweep then
  local all, life = call('HGETALL', KEYS[1]), now + 8 * beat()
  local c, i, cr, w, n = 0, 0, 0, 0, 0
  sweep = life
  for k = 1, #all, 2 do
    local e_seq, e_claim, e_in_flight, e_critical, e_workers, ends = match(all[k + 1], ENTRY)
    if e_seq then
      claims, all_in_flight, all_critical, all_workers, instances =
        claims - e_claim, all_in_flight - e_in_flight, all_critical - e_critical, all_workers - e_workers, instances - 1
      ends = ends + 0
      if now < at and ends > life then
        ends = life
        call('HSET', KEYS[1], all[k], format('%s %s %s %s %s %.0f', e_seq, e_claim, e_in_flight, e_critical, e_workers, ends))
      end
      if ends > now then
        c, i, cr, w, n = c + e_claim, i + e_in_flight, cr + e_critical, w + e_workers, n + 1
        sweep = min(sweep, ends)
      else
        call('HDEL', KEYS[1], all[k])
        if all[k] == id then own = nil end
      end
    end
  end
  drift = abs(claims) + abs(all_in_flight) + abs(all_critical) + abs(all_workers) + abs(instances) -- what nobody had
  claims, all_in_flight, all_critical, all_workers, instances = c, i, cr, w, n
  sweep = max(sweep, now + beat() / 4)
  auto_at, poor_at, warm = min(auto_at, now), min(poor_at, now), min(warm, now + 2 * beat())
  expire = true
end

-- Somebody who remembers what is not here shows that state was lost: by
-- FLUSHALL, or by a failover to a replica that lagged behind.
local before = own and own_claim + 0 or 0
local other = epoch > 0 and epoch ~= began and now - began < 8 * beat()
if other then auto, auto_at = max(auto, known), now end
if other or held > before then
  if now - warm > 8 * beat() then warm, lost = now + 2 * beat(), 0 end
  lost = max(lost, sum)
end

if own then
  claims, all_in_flight, all_critical, all_workers, instances =
    claims - before, all_in_flight - own_in_flight, all_critical - own_critical, all_workers - own_workers, instances - 1
end
local base = min(held, before) -- it has no more, whatever it was granted in replies that it lost
if leave then
  if own then call('HDEL', KEYS[1], id) end
else
  claims, all_in_flight, all_critical, all_workers, instances =
    claims + base, all_in_flight + in_flight, all_critical + critical, all_workers + workers, instances + 1
  if generation == 0 and (newest == 0 or fixed ~= capacity or kept ~= reserve) then
    generation = max(now, newest + 1)
  end
  if generation > newest then
    newest, fixed, kept = generation, capacity, reserve
  end
end

-- The sum of the workers rises at once, and falls to the most there were in ten
-- seconds in which there were always fewer.
if all_workers >= auto then
  auto, auto_at, auto_max = all_workers, 0, 0
else
  if auto_at == 0 then auto_at = now end
  auto_max = max(auto_max, all_workers)
  if now - auto_at >= 10000000 then auto, auto_at, auto_max = auto_max, now, all_workers end
end
if fixed > 0 then capacity = fixed else capacity = auto end -- in force
local allocation = floor(capacity * (10000 - kept) / 10000)

local claim, limit, entry = 0, 0, nil
if not leave then
  -- An instance that lacks slots is poor, one that has at least two more is rich:
  -- for a while the rich do not grow, and give up what the poor is missing, at
  -- most an eighth of what is between them at a time.
  local contended = now - poor_at <= 2 * hold()
  local rich = contended and base > poor + 1
  -- It gets back what it held. Beyond that, what is needed may fill the
  -- allocation, and headroom four fifths of it; during the two beats after a
  -- loss, lost counts what all held and what was granted since.
  claim = max(base, min(held, base + allocation - claims))
  lost = lost - (before - base)
  local taken = claims + claim - base
  if now < warm then taken = max(taken, lost) end
  local room = max(0, allocation - taken)
  local spare = max(0, floor(allocation * 4 / 5) - taken)
  if not rich then
    local granted = max(claim, min(need, claim + room), min(wanted, claim + spare))
    lost = lost + granted - claim
    claim = granted
  end
  if claim < need and (claim <= poor or not contended) then
    poor, poor_at, missing = claim, now, need - claim
  end
  claims = claims + claim - base
  limit = claim
  if claims > allocation then
    limit = floor(claim * allocation / claims)
  elseif rich then
    limit = claim - max(1, min(missing, floor((claim - poor) / 8)))
  end
  local ends = now + 8 * beat()
  sweep = min(sweep, ends)
  entry = format('%.0f %.0f %.0f %.0f %.0f %.0f', seq, claim, in_flight, critical, workers, ends)
end

local state = format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f',
  began, now, sweep, warm, lost, poor, poor_at, missing, newest, fixed, kept, auto, auto_at, auto_max,
  claims, all_in_flight, all_critical, all_workers, instances)
if entry then call('HSET', KEYS[1], 'state', state, id, entry) else call('HSET', KEYS[1], 'state', state) end
if expire then call('PEXPIRE', KEYS[1], 60000 + 8 * beat() / 1000) end
return {now, claim, limit, beat(), hold(), began, newest, capacity, allocation,
  claims, all_in_flight, all_critical, all_workers, instances, drift, now < warm and 1 or 0}
