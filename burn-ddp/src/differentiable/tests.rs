use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::{Ddp, ReduceOp, Result};

/// Function that the tests differentiate, with the `x` of all ranks.
type Forward = fn(&Ddp, Tensor<2>) -> Result<Tensor<2>>;
/// Its expected value on each rank, computed in one process.
type Oracle = fn(&[Tensor<2>]) -> Vec<Tensor<2>>;

fn numbers(rows: usize, salt: usize, device: &Device) -> Tensor<2> {
    let values: Vec<f64> = (0..rows * 3).map(|i| ((i * 37 + salt * 11) % 23) as f64 / 7.0 - 1.5).collect();
    Tensor::from_data(TensorData::new(values, [rows, 3]), (device, DType::F64))
}

/// Not linear, and another one on each rank.
fn loss(y: Tensor<2>, rank: usize) -> Tensor<1> {
    let weights = numbers(y.dims()[0], rank + 5, &y.device());
    (y.clone().powi_scalar(3) * weights + y.sin()).sum()
}

fn values(x: Tensor<2>) -> Vec<f64> {
    x.into_data().try_to_vec().unwrap()
}

fn follows(rows: fn(usize) -> usize, forward: Forward, oracle: Oracle) {
    for world_size in 1..=3 {
        let device = Device::flex().autodiff();
        let x: Vec<Tensor<2>> =
            (0..world_size).map(|rank| numbers(rows(world_size), rank, &device).require_grad()).collect();
        let y = oracle(&x);
        let total = y.iter().enumerate().map(|(rank, y)| loss(y.clone(), rank)).reduce(|a, b| a + b).unwrap();
        let gradients = total.backward();
        let expected = x.iter().zip(y).map(|(x, y)| (values(y.detach()), values(x.grad(&gradients).unwrap())));

        let got = Ddp::spawn(world_size, |ddp| {
            let device = ddp.device()?.autodiff();
            let leaf = numbers(rows(ddp.world_size()), ddp.rank(), &device).require_grad();
            let y = forward(&ddp, leaf.clone())?;
            let gradients = loss(y.clone(), ddp.rank()).backward();
            Ok((values(y.detach()), values(leaf.grad(&gradients).unwrap())))
        })
        .unwrap();
        for (rank, (got, expected)) in got.iter().zip(expected).enumerate() {
            for (got, expected) in [(&got.0, &expected.0), (&got.1, &expected.1)] {
                assert_eq!(got.len(), expected.len());
                for (got, expected) in got.iter().zip(expected) {
                    let error = (got - expected).abs() / expected.abs().max(1.0);
                    assert!(error <= 1e-12, "rank {rank} of {world_size}: {got} instead of {expected}");
                }
            }
        }
    }
}

fn sum(x: &[Tensor<2>]) -> Tensor<2> {
    x.iter().cloned().reduce(|a, b| a + b).unwrap()
}

fn slices(x: &Tensor<2>, n: usize) -> Vec<Tensor<2>> {
    x.clone().chunk(n, 0)
}

#[test]
fn all_reduce_follows_one_process() {
    follows(|_| 4, |ddp, x| ddp.differentiable().all_reduce(x, ReduceOp::Sum), |x| vec![sum(x); x.len()]);
    follows(
        |_| 4,
        |ddp, x| ddp.differentiable().all_reduce(x, ReduceOp::Mean),
        |x| vec![sum(x) * (1.0 / x.len() as f64); x.len()],
    );
}

#[test]
fn all_gather_follows_one_process() {
    follows(|_| 2, |ddp, x| ddp.differentiable().all_gather(x), |x| vec![Tensor::cat(x.to_vec(), 0); x.len()]);
}

#[test]
fn reduce_scatter_follows_one_process() {
    follows(|n| 2 * n, |ddp, x| ddp.differentiable().reduce_scatter(x, ReduceOp::Sum), |x| slices(&sum(x), x.len()));
    follows(
        |n| 2 * n,
        |ddp, x| ddp.differentiable().reduce_scatter(x, ReduceOp::Mean),
        |x| slices(&(sum(x) * (1.0 / x.len() as f64)), x.len()),
    );
}

#[test]
fn several_in_one_graph_come_back_in_order() {
    follows(
        |n| 2 * n,
        |ddp, x| {
            let d = ddp.differentiable();
            let a = d.all_reduce(x.clone().tanh(), ReduceOp::Mean)?;
            let b = d.all_gather(d.reduce_scatter(x.clone(), ReduceOp::Sum)?)?;
            // User calls have a sequence of their own.
            assert_eq!(ddp.sum(1.0)?, ddp.world_size() as f64);
            d.all_reduce(a * b + x, ReduceOp::Sum)
        },
        |x| {
            let n = x.len() as f64;
            let a = sum(&x.iter().map(|x| x.clone().tanh()).collect::<Vec<_>>()) * (1.0 / n);
            let ab = a * sum(x);
            vec![sum(&x.iter().map(|x| ab.clone() + x.clone()).collect::<Vec<_>>()); x.len()]
        },
    );
}

#[test]
fn gradient_checkpointing_repeats_no_collective() {
    let gradients = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff().gradient_checkpointing();
        let x = Tensor::<1>::from_floats([1.0 + ddp.rank() as f32], &device).require_grad();
        let y = ddp.differentiable().all_reduce(x.clone() * 2.0, ReduceOp::Sum)?;
        Ok(x.grad(&(y.clone().tanh() + y * 3.0).exp().sum().backward()).unwrap().into_scalar::<f32>())
    })
    .unwrap();
    assert_eq!(gradients[0], gradients[1]);
    assert!(gradients[0].is_finite() && gradients[0] > 0.0);
}

#[test]
fn untracked_is_a_plain_collective() {
    let y = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?;
        let x = Tensor::<1>::from_floats([1.0 + ddp.rank() as f32], &device);
        let y = ddp.differentiable().all_reduce(x.clone(), ReduceOp::Sum)?;
        let detached = ddp.differentiable().all_gather(Tensor::<1>::from_inner(x))?;
        assert!(!y.is_tracked() && !detached.is_tracked());
        assert!(detached.is_autodiff());
        Ok((y.into_scalar::<f32>(), detached.into_data().try_to_vec::<f32>()?))
    })
    .unwrap();
    assert_eq!(y, [(3.0, vec![1.0, 2.0]), (3.0, vec![1.0, 2.0])]);
}

#[test]
fn what_cannot_be_differentiated_is_refused() {
    Ddp::spawn(2, |ddp| {
        let x = Tensor::<1>::ones([3], &ddp.device()?.autodiff()).require_grad();
        let d = ddp.differentiable();
        for e in [d.all_reduce(x.clone(), ReduceOp::Max), d.reduce_scatter(x.clone(), ReduceOp::Product)] {
            let e = e.unwrap_err().to_string();
            assert!(e.contains("takes sum or mean"), "{e}");
        }
        let e = d.reduce_scatter(x, ReduceOp::Sum).unwrap_err().to_string();
        assert!(e.contains("3 rows do not divide by 2 ranks"), "{e}");
        Ok(ddp.barrier()?) // and the job goes on
    })
    .unwrap();
}

/// Rank 1 leaves before its backward: rank 0 says so, as an error, or by a panic if the model is not wrapped.
#[test]
fn a_peer_that_runs_no_backward_is_named() {
    use burn::nn::LinearConfig;
    for wrapped in [false, true] {
        let e = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut model = LinearConfig::new(2, 2).init(&device);
            if wrapped {
                model = ddp.wrap(model)?;
            }
            let y = ddp.differentiable().all_gather(model.forward(Tensor::<2>::ones([1, 2], &device)))?;
            if ddp.rank() == 1 {
                return Ok(String::new());
            }
            if wrapped {
                return Ok(ddp.backward(&y.sum(), &model).map(drop).unwrap_err().to_string());
            }
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| y.sum().backward())).map(drop);
            Ok(panic.unwrap_err().downcast_ref::<String>().cloned().unwrap_or_default())
        })
        .unwrap();
        assert!(e[0].contains("rank 1") && e[0].contains("reduce_scatter"), "{}", e[0]);
    }
}
