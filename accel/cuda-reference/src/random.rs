//! cuRAND's generators. All are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), whose number at any place
//! follows from the seed and the place alone; they are not the numbers that cuRAND has (docs/accel-cuda-reference.md).
//!
//! ```text
//!   seed, place / 4 ── ten rounds ──▶ four words ──▶ the word at place % 4 ──▶ a whole number, a uniform one, half of a pair of normal ones
//! ```
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "random words become numbers of what type is asked for"
)]

use std::collections::HashMap;
use std::f64::consts::TAU;

use accel_proto::SvmAddress;
use accel_proto::cuda::AnyCall;

use crate::Error;
use crate::memory::Memory;
use crate::numeric::Stop;

/// Elements between two looks at whether the client is there.
const LOOK: usize = 1 << 14;
/// The most that cuRAND's documentation lets lambda be.
const MOST_LAMBDA: f64 = 400_000.0;
/// The third word of counters for Poisson's numbers is the draw and the last is this, so that they are none of the sequence's.
const POISSON: u32 = 1;

/// Four words of a counter and of a key.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let (high_0, low_0) = product(0xd251_1f53, counter[0]);
        let (high_1, low_1) = product(0xcd9e_8d57, counter[2]);
        counter = [high_1 ^ counter[1] ^ key[0], low_1, high_0 ^ counter[3] ^ key[1], low_0];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

/// A client's generator.
#[derive(Debug, Clone, Copy, Default)]
struct Generator {
    seed: u64,
    /// How many words were given.
    place: u64,
}

fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Of a word: above zero, and one at most.
fn uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) * 2f64.powi(-32)
}

/// Of two words, with all digits of a double.
fn uniform_double([low, high]: [u32; 2]) -> f64 {
    let word = u64::from(high) << 32 | u64::from(low);
    ((word >> 11) as f64 + 0.5) * 2f64.powi(-53)
}

/// Two normal numbers of two uniform ones (Box and Muller).
fn normal([one, other]: [f64; 2]) -> [f64; 2] {
    let (radius, angle) = ((-2.0 * one.ln()).sqrt(), TAU * other);
    [radius * angle.sin(), radius * angle.cos()]
}

impl Generator {
    /// Words from here on, of which so many belong to one element.
    fn each<const WORDS: usize>(
        &mut self,
        count: usize,
        stop: Stop<'_>,
        mut each: impl FnMut(usize, [u32; WORDS]),
    ) -> Result<(), Error> {
        let (mut block, mut words) = (None, [0; 4]);
        for element in 0..count {
            if element % LOOK == 0 {
                stop.check()?;
            }
            let element_words = [(); WORDS].map(|()| {
                let at = self.place;
                if block != Some(at / 4) {
                    block = Some(at / 4);
                    let [low, high] = halves(at / 4);
                    words = philox([low, high, 0, 0], halves(self.seed));
                }
                self.place = at.wrapping_add(1);
                words[(at % 4) as usize]
            });
            each(element, element_words);
        }
        Ok(())
    }

    /// One Poisson number of the generator's own stream for a place.
    fn poisson(&self, place: u64, lambda: f64) -> u32 {
        let [low, high] = halves(place);
        let mut draw = 0;
        let mut next = || {
            let words = philox([low, high, draw, POISSON], halves(self.seed));
            draw += 1;
            [
                uniform_double([words[0], words[1]]),
                uniform_double([words[2], words[3]]),
            ]
        };
        if lambda < 10.0 {
            // How many uniform numbers can be multiplied before the product is below this (Knuth).
            let (least, mut product, mut count) = ((-lambda).exp(), 1.0, 0);
            loop {
                for factor in next() {
                    product *= factor;
                    if product <= least {
                        return count;
                    }
                    count += 1;
                }
            }
        }
        // Transformed rejection (Hoermann, "The transformed rejection method for generating Poisson random variables", 1993: PTRS).
        let b = 0.931 + 2.53 * lambda.sqrt();
        let a = -0.059 + 0.02483 * b;
        let inverse_alpha = 1.1239 + 1.1328 / (b - 3.4);
        let v_r = 0.9277 - 3.6224 / (b - 2.0);
        loop {
            let [u, v] = next();
            let u = u - 0.5;
            let us = 0.5 - u.abs();
            let k = ((2.0 * a / us + b) * u + lambda + 0.43).floor();
            if us >= 0.07 && v <= v_r {
                return k as u32;
            }
            if k < 0.0 || us < 0.013 && v > us {
                continue;
            }
            let left = v.ln() + inverse_alpha.ln() - (a / (us * us) + b).ln();
            if left <= k * lambda.ln() - lambda - ln_factorial(k) {
                return k as u32;
            }
        }
    }
}

fn ln_factorial(k: f64) -> f64 {
    if k < 16.0 {
        return (2..=k as u32).map(|factor| f64::from(factor).ln()).sum();
    }
    // Stirling's series, whose first left-out term is below 1e-11 here.
    let series = 1.0 / (12.0 * k) - 1.0 / (360.0 * k.powi(3)) + 1.0 / (1260.0 * k.powi(5));
    (k + 0.5) * k.ln() - k + 0.5 * TAU.ln() + series
}

/// A client's generators, by their names.
#[derive(Debug, Default)]
pub(crate) struct Generators(HashMap<u32, Generator>);

/// What is asked for of a generator.
#[derive(Debug, Clone, Copy)]
enum Wanted {
    Words,
    Uniform,
    UniformDouble,
    /// With mean and deviation; whether the exponential is wanted.
    Normal(f64, f64, bool),
    NormalDouble(f64, f64, bool),
    Poisson(f64),
}

impl Generators {
    /// Carries a call out, if it is one of cuRAND's. That the generator is there, objects have seen.
    pub(crate) fn carry_out(
        &mut self,
        call: &AnyCall<'_>,
        memory: &mut Memory,
        stop: Stop<'_>,
    ) -> Option<Result<(), Error>> {
        let single = |bits: u32| f64::from(f32::from_bits(bits));
        let double = f64::from_bits;
        let (generator, place, wanted) = match call {
            AnyCall::CurandCreateGenerator(call) => return Some(self.create(call.generator.raw(), call.rng_type)),
            AnyCall::CurandDestroyGenerator(call) => {
                self.0.remove(&call.generator.raw());
                return Some(Ok(()));
            }
            AnyCall::CurandSetPseudoRandomGeneratorSeed(call) => {
                // A new seed begins a sequence anew.
                let seed = |generator: &mut Generator| {
                    *generator = Generator {
                        seed: call.seed,
                        place: 0,
                    }
                };
                return Some(self.find(call.generator.raw()).map(seed));
            }
            AnyCall::CurandSetGeneratorOffset(call) => {
                return Some(
                    self.find(call.generator.raw())
                        .map(|generator| generator.place = call.offset),
                );
            }
            // There is one order, and nothing to prepare.
            AnyCall::CurandSetGeneratorOrdering(_) | AnyCall::CurandGenerateSeeds(_) | AnyCall::CurandSetStream(_) => {
                return Some(Ok(()));
            }
            AnyCall::CurandGenerate(call) => (call.generator, (call.output_ptr, call.num), Wanted::Words),
            AnyCall::CurandGenerateUniform(call) => (call.generator, (call.output_ptr, call.num), Wanted::Uniform),
            AnyCall::CurandGenerateUniformDouble(call) => {
                (call.generator, (call.output_ptr, call.num), Wanted::UniformDouble)
            }
            AnyCall::CurandGenerateNormal(call) => {
                let wanted = Wanted::Normal(single(call.mean), single(call.stddev), false);
                (call.generator, (call.output_ptr, call.num), wanted)
            }
            AnyCall::CurandGenerateLogNormal(call) => {
                let wanted = Wanted::Normal(single(call.mean), single(call.stddev), true);
                (call.generator, (call.output_ptr, call.num), wanted)
            }
            AnyCall::CurandGenerateNormalDouble(call) => {
                let wanted = Wanted::NormalDouble(double(call.mean), double(call.stddev), false);
                (call.generator, (call.output_ptr, call.num), wanted)
            }
            AnyCall::CurandGenerateLogNormalDouble(call) => {
                let wanted = Wanted::NormalDouble(double(call.mean), double(call.stddev), true);
                (call.generator, (call.output_ptr, call.num), wanted)
            }
            AnyCall::CurandGeneratePoisson(call) => {
                let wanted = Wanted::Poisson(double(call.lambda));
                (call.generator, (call.output_ptr, call.num), wanted)
            }
            _ => return None,
        };
        let found = self.find(generator.raw());
        Some(found.and_then(|generator| generator.generate(place, wanted, memory, stop)))
    }

    /// Names, seeds, and how many words were given.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, u64, u64)> {
        self.0
            .iter()
            .map(|(name, generator)| (*name, generator.seed, generator.place))
    }

    /// One that has given so many words.
    pub(crate) fn add(&mut self, (name, seed, place): (u32, u64, u64)) {
        self.0.insert(name, Generator { seed, place });
    }

    fn create(&mut self, name: u32, kind: i32) -> Result<(), Error> {
        match kind {
            // CURAND_RNG_PSEUDO_DEFAULT, _XORWOW, _PHILOX4_32_10
            100 | 101 | 161 => {
                self.0.insert(name, Generator::default());
                Ok(())
            }
            _ => Err(Error::NotComputed("a generator other than XORWOW and Philox")),
        }
    }

    fn find(&mut self, name: u32) -> Result<&mut Generator, Error> {
        self.0
            .get_mut(&name)
            .ok_or(Error::Failure(accel_cuda_null::Failure::InvalidHandle))
    }
}

impl Generator {
    fn generate(
        &mut self,
        (at, count): (SvmAddress, u64),
        wanted: Wanted,
        memory: &mut Memory,
        stop: Stop<'_>,
    ) -> Result<(), Error> {
        let size = match wanted {
            Wanted::Words | Wanted::Uniform | Wanted::Normal(..) | Wanted::Poisson(_) => 4,
            Wanted::UniformDouble | Wanted::NormalDouble(..) => 8,
        };
        let length = count
            .checked_mul(size)
            .ok_or(Error::Invalid("more numbers than any memory has"))?;
        let bytes = memory.bytes_mut(at.0, length)?;
        let count = bytes.len() / size as usize;
        if matches!(wanted, Wanted::Normal(..) | Wanted::NormalDouble(..)) && count % 2 == 1 {
            return Err(Error::Invalid("an odd count of normal numbers, which come in pairs"));
        }
        let exponential = |value: f64, is_log: bool| if is_log { value.exp() } else { value };
        match wanted {
            Wanted::Words => {
                let (words, _) = bytes.as_chunks_mut::<4>();
                self.each(count, stop, |at, [word]| words[at] = word.to_le_bytes())
            }
            Wanted::Uniform => {
                let (words, _) = bytes.as_chunks_mut::<4>();
                self.each(count, stop, |at, [word]| {
                    words[at] = (uniform(word) as f32).to_le_bytes()
                })
            }
            Wanted::UniformDouble => {
                let (words, _) = bytes.as_chunks_mut::<8>();
                self.each(count, stop, |at, pair| words[at] = uniform_double(pair).to_le_bytes())
            }
            Wanted::Normal(mean, deviation, is_log) => {
                let (pairs, _) = bytes.as_chunks_mut::<8>();
                self.each(count / 2, stop, |at, [one, other]| {
                    let pair = normal([uniform(one), uniform(other)]);
                    let pair = pair.map(|value| exponential(value * deviation + mean, is_log) as f32);
                    pairs[at][..4].copy_from_slice(&pair[0].to_le_bytes());
                    pairs[at][4..].copy_from_slice(&pair[1].to_le_bytes());
                })
            }
            Wanted::NormalDouble(mean, deviation, is_log) => {
                let (pairs, _) = bytes.as_chunks_mut::<16>();
                self.each(count / 2, stop, |at, [a, b, c, d]| {
                    let pair = normal([uniform_double([a, b]), uniform_double([c, d])]);
                    let pair = pair.map(|value| exponential(value * deviation + mean, is_log));
                    pairs[at][..8].copy_from_slice(&pair[0].to_le_bytes());
                    pairs[at][8..].copy_from_slice(&pair[1].to_le_bytes());
                })
            }
            Wanted::Poisson(lambda) => {
                if !(lambda > 0.0 && lambda <= MOST_LAMBDA) {
                    return Err(Error::Invalid("a lambda that is not above zero, or above 400 000"));
                }
                let (words, _) = bytes.as_chunks_mut::<4>();
                let generator = *self;
                self.each(count, stop, |at, [_]| {
                    let place = generator.place.wrapping_add(at as u64);
                    words[at] = generator.poisson(place, lambda).to_le_bytes();
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_has_the_answers_of_its_authors() {
        // Random123's known answers (kat_vectors, philox4x32 10).
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let wanted = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0]), wanted);
    }

    #[test]
    fn factorials_are_those_of_their_products() {
        for k in [0_u32, 1, 2, 15, 16, 40, 170] {
            let exact: f64 = (1..=k).map(|factor| f64::from(factor).ln()).sum();
            assert!((ln_factorial(f64::from(k)) - exact).abs() < 1e-9, "{k}");
        }
    }

    #[test]
    fn uniform_numbers_are_above_zero_and_one_at_most() {
        assert!(uniform(0) > 0.0 && uniform(u32::MAX) as f32 <= 1.0 && uniform(0) as f32 > 0.0);
        assert!(uniform_double([0, 0]) > 0.0 && uniform_double([u32::MAX; 2]) <= 1.0);
    }
}
