//! Objects are made again: the calls that are in the file, carried out as if the client had sent them.
#![allow(unsafe_code, reason = "calls functions of a C API")]

use std::sync::{Arc, PoisonError};

use accel_proto::control::Completion;
use accel_proto::opencl::{AnyCall, Event};
use accel_proto::{Callback, Handle, Limits, Span};

use super::Refusal;
use super::calls::{self, logged};
use super::devices::Devices;
use super::state::{self, Objects, Program, Step};
use super::whole::Image;
use crate::api::{Code, P, check};
use crate::dispatch::carry_out;
use crate::manual::{build_options, check_map};
use crate::objects::{Held, Object, Sort, State};
use crate::session::{Client, Session};

const NULL: P = std::ptr::null_mut();

/// What a call that is made again has in place of the arena.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    /// Bytes that it reads, from where they were.
    pub(crate) reads: Vec<(u64, Box<[u8]>)>,
    /// What new memory is made of, and whether it stays there.
    pub(crate) contents: Option<Contents>,
}

/// Bytes of the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Contents {
    pub(crate) at: P,
    /// How many there are.
    pub(crate) length: u64,
    /// The back end may use them in place.
    pub(crate) in_place: bool,
}

impl Replay {
    /// Bytes of a part of the arena.
    pub(crate) fn find(&self, span: Span) -> Result<&[u8], Code> {
        let found = self.reads.iter().find_map(|(offset, bytes)| {
            let begin = usize::try_from(span.offset.checked_sub(*offset)?).ok()?;
            let end = begin.checked_add(usize::try_from(span.length).ok()?)?;
            bytes.get(begin..end)
        });
        found.ok_or(Code::INVALID_VALUE)
    }
}

/// Makes all of a client's objects.
pub(super) fn objects(client: &Client, saved: &Objects, devices: &Devices, image: &Image) -> Result<(), Refusal> {
    let mut cx = Session::new(client);
    tell(&cx, saved, devices)?;
    for step in &saved.steps {
        match step {
            Step::Call(call) => run(&mut cx, call, None, image)?,
            Step::Memory(call, bytes) => {
                let contents = Contents {
                    at: image.place(*bytes)?,
                    length: bytes.length,
                    in_place: devices.are_the_hosts,
                };
                run(&mut cx, call, Some(contents), image)?;
            }
            Step::Program(program) => {
                if let Err(why) = from_binaries(&mut cx, program, image) {
                    log::info!("a program is built anew, as the driver does not take its binaries: {why}");
                    program
                        .calls
                        .iter()
                        .try_for_each(|call| run(&mut cx, call, None, image))?;
                }
            }
            Step::Event {
                name,
                context,
                queue,
                past,
            } => event(&cx, (*name, *context), *queue, State::Past(*past), past.status)?,
            Step::UserEvent { name, context, status } => {
                event(&cx, (*name, *context), None, State::UserEvent, *status)?;
            }
        }
    }
    if let Some(cuda) = &saved.cuda {
        crate::cuda::restore(client, cuda, &|bytes| image.bytes(*bytes).ok())?;
    }
    finish(&cx, saved)
}

/// What the back end has told of, under the names that it had.
fn tell(cx: &Session<'_>, saved: &Objects, devices: &Devices) -> Result<(), Refusal> {
    let missing = || Refusal::Format("it names a device that is not there".to_owned());
    let platforms: Option<Vec<P>> = saved.platforms.iter().map(|place| devices.platform(*place)).collect();
    cx.tell::<accel_proto::opencl::Platform>(&platforms.ok_or_else(missing)?);
    let found: Option<Vec<P>> = saved.devices.iter().map(|place| devices.device(*place)).collect();
    cx.tell::<accel_proto::opencl::Device>(&found.ok_or_else(missing)?);
    Ok(())
}

/// What is left when all objects are there.
fn finish(cx: &Session<'_>, saved: &Objects) -> Result<(), Refusal> {
    let client = cx.client;
    for (mem, maps) in &saved.maps {
        let object = client.find(Sort::Mem, *mem).map_err(Refusal::code)?;
        let memory = object.memory().map_err(Refusal::code)?;
        if maps.iter().any(|map| check_map(cx, &object, map).is_err()) {
            return Err(Refusal::Format("a map is not within its object".to_owned()));
        }
        memory
            .maps
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(maps);
    }
    for (sort, name, code) in &saved.failures {
        let sort = Sort::ALL
            .get(*sort)
            .copied()
            .ok_or_else(|| Refusal::Format("a sort".to_owned()))?;
        client
            .find(sort, *name)
            .map_err(Refusal::code)?
            .keep_failure(Code(*code));
    }
    if !client.settle(&saved.places) {
        return Err(Refusal::Format("an object was not made".to_owned()));
    }
    for (callback, status) in &saved.due {
        client.completions.push(Completion {
            callback: Callback(*callback),
            status: *status,
        });
    }
    Ok(())
}

fn limits(client: &Client) -> Limits {
    Limits { arena: client.arena() }
}

/// The calls that a client had made, made again.
fn run(cx: &mut Session<'_>, call: &state::Call, contents: Option<Contents>, image: &Image) -> Result<(), Refusal> {
    let reads = call
        .reads
        .iter()
        .map(|(offset, bytes)| Ok((*offset, image.bytes(*bytes)?.into())));
    cx.replay = Some(Replay {
        reads: reads.collect::<Result<_, Refusal>>()?,
        contents,
    });
    let arguments = image.bytes(call.arguments)?;
    let decoded = AnyCall::decode(call.op, arguments, limits(cx.client))
        .map_err(|error| Refusal::Format(format!("a call: {error}")));
    let outcome = decoded.and_then(|decoded| {
        make_room(cx.client, &decoded);
        carry_out(cx, &decoded).map_err(|code| {
            Refusal::Driver(format!(
                "call {:#06x} failed with {} where it is made again",
                call.op, code.0
            ))
        })?;
        calls::log(cx, &decoded);
        Ok(())
    });
    cx.replay = None;
    outcome
}

/// Objects that had its names before were released.
fn make_room(client: &Client, call: &AnyCall<'_>) {
    call.effects(&mut |effect, object| {
        if let (accel_proto::Effect::Creates, accel_proto::Object::Handle(handle)) = (effect, object)
            && let Some(sort) = Sort::of(handle.c_type)
        {
            client.make_room(sort, handle.raw);
        }
    });
}

/// A program of what another server had built.
fn from_binaries(cx: &mut Session<'_>, program: &Program, image: &Image) -> Result<(), Refusal> {
    let client = cx.client;
    let context = client.find(Sort::Context, program.context).map_err(Refusal::code)?;
    let devices = program.devices.iter().map(|device| client.find(Sort::Device, *device));
    let devices: Vec<Held> = devices.collect::<Result<_, _>>().map_err(Refusal::code)?;
    let raws: Vec<P> = devices.iter().map(|device| device.raw()).collect();
    let binaries = program.binaries.iter().map(|binary| image.bytes(*binary));
    let binaries: Vec<&[u8]> = binaries.collect::<Result<_, _>>()?;
    if raws.is_empty() || raws.len() != binaries.len() {
        return Err(Refusal::Format("a program's devices".to_owned()));
    }
    let lengths: Vec<u64> = binaries.iter().map(|binary| binary.len() as u64).collect();
    let pointers: Vec<P> = binaries
        .iter()
        .map(|binary| binary.as_ptr().cast_mut().cast())
        .collect();
    let api = &client.backend.api;
    let create = api.clCreateProgramWithBinary().map_err(Refusal::code)?;
    let build = api.clBuildProgram().map_err(Refusal::code)?;
    let mut status = 0_i32;
    let count = u32::try_from(raws.len()).unwrap_or(u32::MAX);
    let (list, place) = (raws.as_ptr().cast_mut().cast(), (&raw mut status).cast());
    let (lengths, pointers) = (lengths.as_ptr().cast_mut().cast(), pointers.as_ptr().cast_mut().cast());
    // SAFETY: 1. objects are held; 2. lists have as many elements as is said, and each binary its length; 3. the place is for an error code.
    let raw = unsafe { create(context.raw(), count, list, lengths, pointers, NULL, place) };
    check(status).map_err(Refusal::code)?;
    let object = Object::new(&client.backend, (Sort::Program, raw), State::Rebuilt, &[&context]);
    let mut calls = Vec::new();
    for call in &program.calls {
        calls.push(
            AnyCall::decode(call.op, image.bytes(call.arguments)?, limits(client))
                .map_err(|error| Refusal::Format(format!("a call: {error}")))?,
        );
    }
    let options = calls.iter().rev().find_map(|call| match call {
        AnyCall::BuildProgram(call) => Some(call.options),
        _ => None,
    });
    let options = build_options(options.flatten());
    // SAFETY: 1. the program is this function's, devices are held; 2. the options end with a zero.
    let built = unsafe { build(raw, count, list, options.as_ptr().cast_mut().cast(), NULL, NULL) };
    check(built).map_err(Refusal::code)?;
    client.make_room(Sort::Program, program.name);
    client
        .insert_object(Sort::Program, program.name, object)
        .map_err(Refusal::code)?;
    // What it was made by, should it be saved again, or built otherwise.
    let object = client.find(Sort::Program, program.name).map_err(Refusal::code)?;
    for (call, decoded) in program.calls.iter().zip(&calls) {
        let reads = call
            .reads
            .iter()
            .map(|(offset, bytes)| Ok((*offset, image.bytes(*bytes)?.into())));
        cx.replay = Some(Replay {
            reads: reads.collect::<Result<_, Refusal>>()?,
            contents: None,
        });
        let order = client.order.as_ref().map_or(0, super::Order::next);
        let again = logged(cx, order, decoded);
        cx.replay = None;
        let again = again.ok_or_else(|| Refusal::Format("a call".to_owned()))?;
        object.log.lock().unwrap_or_else(PoisonError::into_inner).push(again);
    }
    Ok(())
}

/// An event that is complete, or is the client's to complete.
fn event(
    cx: &Session<'_>,
    (name, context): (u32, u32),
    queue: Option<u32>,
    state: State,
    status: i32,
) -> Result<(), Refusal> {
    let client = cx.client;
    let queue = queue.map(|queue| client.find(Sort::CommandQueue, queue)).transpose();
    let queue = queue.map_err(Refusal::code)?;
    let held = queue.as_ref().and_then(|queue| queue.owner(Sort::Context));
    let context = match held {
        // The context's name may have been another one's before there was the command.
        Some(context) => Held(Arc::clone(context)),
        None => client.find(Sort::Context, context).map_err(Refusal::code)?,
    };
    let api = &client.backend.api;
    let function = api.clCreateUserEvent().map_err(Refusal::code)?;
    let mut code = 0_i32;
    // SAFETY: 1. the context is held; 2. the place is for an error code.
    let raw = unsafe { function(context.raw(), (&raw mut code).cast()) };
    check(code).map_err(Refusal::code)?;
    let owners: Vec<&Held> = queue.iter().chain([&context]).collect();
    client.make_room(Sort::Event, name);
    cx.insert_with(Handle::<Event>::from_raw(name), raw, &owners, state)
        .map_err(Refusal::code)?;
    if status <= 0 {
        let function = api.clSetUserEventStatus().map_err(Refusal::code)?;
        // SAFETY: 1. the event was made above, and is one of the user's.
        check(unsafe { function(raw, status) }).map_err(Refusal::code)?;
    }
    Ok(())
}

/// Of a program that was made of binaries: one by the calls that had made it, in its place, to be built otherwise.
pub(crate) fn original(cx: &mut Session<'_>, name: Handle<accel_proto::opencl::Program>) -> Result<Held, Code> {
    let program = cx.object(name)?;
    if !matches!(program.state, State::Rebuilt) {
        return Ok(program);
    }
    let log = program.log.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let before = cx.client.vacate(Sort::Program, name.raw());
    drop(program);
    let mut made = Ok(());
    for logged in log.into_iter().filter(|logged| !logged.is_build()) {
        cx.replay = Some(Replay {
            reads: logged
                .bytes
                .iter()
                .map(|(span, bytes)| (span.offset, bytes.clone()))
                .collect(),
            contents: None,
        });
        let call = AnyCall::decode(logged.op, &logged.arguments, limits(cx.client));
        made = call.map_err(|_| Code::INVALID_VALUE).and_then(|call| {
            carry_out(cx, &call)?;
            calls::log(cx, &call);
            Ok(())
        });
        cx.replay = None;
        if made.is_err() {
            break;
        }
    }
    if let (Err(_), Some(before)) = (&made, before) {
        cx.client.put_back(Sort::Program, name.raw(), before);
    }
    made.and_then(|()| cx.object(name))
}

/// The source of a program that was made of binaries, with a zero behind it, as the API tells it; nothing if it had none.
pub(crate) fn source(program: &Held) -> Option<Vec<u8>> {
    if !matches!(program.state, State::Rebuilt) {
        return None;
    }
    let log = program.log.lock().unwrap_or_else(PoisonError::into_inner);
    let made = log.first()?;
    let limits = Limits { arena: u64::MAX };
    match AnyCall::decode(made.op, &made.arguments, limits) {
        Ok(AnyCall::CreateProgramWithSource(_)) => {
            let mut source: Vec<u8> = made.bytes.iter().flat_map(|(_, bytes)| bytes.to_vec()).collect();
            source.push(0);
            Some(source)
        }
        _ => None,
    }
}
