//! The run loop: finds or makes the plans of a run and runs their actions in order.

use std::time::Instant;

use smallvec::SmallVec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{LocationId, StorageId};
use tandem_tracegraph::node::Outputs;

use crate::error::CallFailure;
use crate::executor::{Device, Executor, Immediate};
use crate::host::HostKernels;
use crate::plan::{Action, GroupRun, Plan, Plans};
use crate::run::{BlockRun, Event, OpRun, Profile, Program, Span, Tally, tally, with_op};

/// Number of pending measurements after which the driver asks the device for their times, which waits for the device's
/// work.
const MAX_AWAITED: u32 = 1 << 14;

/// An executor on a device, with the program, its plans and the profile.
pub struct Driver<D: Device> {
    program: Program,
    plans: Plans<D::Group>,
    profile: Profile,
    device: D,
}

impl<D: Device> Driver<D> {
    /// An executor on `device`.
    pub fn on(device: D) -> Driver<D> {
        Driver { program: Program::default(), plans: Plans::default(), profile: Profile::default(), device }
    }
}

impl<D: Device> Executor for Driver<D> {
    fn device(&mut self) -> &mut dyn Immediate {
        &mut self.device
    }

    fn program(&mut self) -> &mut Program {
        &mut self.program
    }

    fn forget(&mut self) {
        self.plans.clear();
        self.device.forget();
        self.program.forget();
        self.profile().clear();
    }

    fn profile(&mut self) -> &mut Profile {
        if self.profile.next() > 0 {
            self.profile.took(&self.device.measured());
        }
        &mut self.profile
    }

    fn call(
        &mut self,
        call: &Call<'_>,
        (location, issuer): (LocationId, u64),
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        let Driver { profile, device, .. } = self;
        if !profile.is_logging() {
            return device.call(call, location, name_fresh);
        }
        let (is_own, begin) = (device.attribute(Some(profile.next())), Instant::now());
        let outcome = device.call(call, location, name_fresh);
        device.attribute(None);
        if outcome.is_ok() {
            profile.called(call, (location, issuer), begin, is_own);
        }
        outcome
    }

    fn run(&mut self, run: &BlockRun) {
        let Driver { program, plans, profile, device } = self;
        let whole = Span::whole(run);
        if let Some(plan) = plans.find_whole(run, program, device) {
            plans.unused().iter().for_each(|id| device.release(*id));
            carry_out(device, profile, &plan, &whole, program);
        } else {
            let parts = (run.segments.len() > 1).then(|| plans.parts(run, program));
            let spans: SmallVec<[Span<'_>; 4]> = match &parts {
                Some(parts) => parts.spans(run).collect(),
                None => SmallVec::from_slice(&[whole]),
            };
            for span in &spans {
                match plans.find(span, program, device) {
                    Some(plan) => {
                        plans.unused().iter().for_each(|id| device.release(*id));
                        carry_out(device, profile, &plan, span, program);
                    }
                    None => program.each_of(span, |event| match event {
                        Event::Op(mut op) => run_op(device, profile, &mut op),
                        Event::Release(id) => device.release(id),
                    }),
                }
            }
        }
        if !run.fetched {
            device.end_run();
        }
        if profile.next() > MAX_AWAITED {
            profile.took(&device.measured());
        }
    }
}

/// Number of arithmetic operations of an op.
fn flops(op: &OpRun<'_, '_>, host: &dyn HostKernels) -> u64 {
    (host.operators().get(op.call.op).flops)(op.call, &op.variant.outputs)
}

fn run_op<D: Device>(device: &mut D, profile: &mut Profile, op: &mut OpRun<'_, '_>) {
    if op.dead {
        return device.skip(op);
    }
    let tally = tally(profile, op, |op| flops(op, device.host()));
    measured(device, profile, tally, |device| device.run_op(op));
}

/// Runs a kernel with `run`, which returns whether the kernel ran. Measures the kernel if there is a tally.
fn measured<D: Device>(
    device: &mut D,
    profile: &mut Profile,
    tally: Option<Tally>,
    run: impl FnOnce(&mut D) -> bool,
) -> bool {
    let Some(tally) = tally else { return run(device) };
    let (is_own, begin) = (device.attribute(Some(profile.next())), Instant::now());
    let ran = run(device);
    device.attribute(None);
    match (ran, is_own) {
        (true, true) => profile.awaits(tally, begin),
        (true, false) => profile.ran(tally, begin),
        (false, _) => {}
    }
    ran
}

/// Runs the actions of a span's plan.
fn carry_out<D: Device>(
    device: &mut D,
    profile: &mut Profile,
    plan: &Plan<D::Group>,
    span: &Span<'_>,
    program: &Program,
) {
    let one = |device: &mut D, profile: &mut Profile, number: u32| {
        let (node, variant, cursor) = &plan.ops[number as usize];
        if let Some((declared, known)) = program.op(*node, *variant) {
            let mut at = cursor.absolute(&span.base);
            let op = (*node, *variant, declared, known);
            with_op(&mut at, op, span.run, false, |mut op| run_op(device, profile, &mut op));
        }
    };
    for action in &plan.actions {
        match action {
            Action::Op(number) => one(device, profile, *number),
            Action::Release(place) => device.release(span.storages[*place as usize]),
            Action::Group(fused) => {
                let tally = plan.tally(fused, profile, span, program, |op| flops(op, device.host()));
                let group = GroupRun { plan, fused, span, program };
                if !measured(device, profile, tally, |device| device.run_group(&group)) {
                    fused.ops.clone().for_each(|number| one(device, profile, number));
                }
            }
        }
    }
}
