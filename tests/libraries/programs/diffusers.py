"""Trains a small UNet2DModel with DDPMScheduler, and samples with several schedulers and a pipeline."""

# /// script
# dependencies = ["diffusers==0.42.1"]
# ///

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel, compute_snr
from torch.nn import functional as F

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
STEPS = 60


def stripes(count):
    phase = torch.rand(count, 1, 1, 1) * 6
    return (torch.linspace(0, 9, 16) + phase).sin().expand(count, 1, 16, 16)


unet = UNet2DModel(
    sample_size=16,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=8,
)
scheduler = DDPMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=STEPS)
ema = EMAModel(unet.parameters(), decay=0.9, use_ema_warmup=True)

for step in range(STEPS):
    images = stripes(8)
    noise = torch.randn_like(images)
    timesteps = torch.randint(0, 100, (8,))
    predicted = unet(scheduler.add_noise(images, noise, timesteps), timesteps).sample
    weight = compute_snr(scheduler, timesteps).clamp(max=5) / compute_snr(scheduler, timesteps)
    loss = (F.mse_loss(predicted, noise, reduction="none").mean((1, 2, 3)) * weight).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    ema.step(unet.parameters())
    if step % 10 == 9:
        print("step", step, loss.item(), schedule.get_last_lr()[0])

ema.copy_to(unet.parameters())
unet.eval()
for sampler_class in (
    DDPMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
):
    with torch.device("cpu"):  # schedulers compute their tables with NumPy
        sampler = sampler_class.from_config(scheduler.config)
        sampler.set_timesteps(6)
    sample = torch.randn(2, 1, 16, 16) * sampler.init_noise_sigma
    with torch.no_grad():
        for t in sampler.timesteps:
            sample = sampler.step(unet(sampler.scale_model_input(sample, t), t).sample, t, sample).prev_sample
    print(sampler_class.__name__, sample.mean().item(), sample.std().item())

pipeline = DDPMPipeline(unet, scheduler)
pipeline.set_progress_bar_config(disable=True)
pictures = pipeline(batch_size=2, num_inference_steps=5, output_type="np").images
print("pipeline", pictures.shape, float(pictures.mean()))

vae = AutoencoderKL(
    in_channels=1,
    out_channels=1,
    block_out_channels=(8, 8),
    layers_per_block=1,
    latent_channels=2,
    norm_num_groups=4,
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
)
conditional = UNet2DConditionModel(
    sample_size=8,
    in_channels=2,
    out_channels=2,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=8,
    attention_head_dim=4,
)
optimizer = torch.optim.Adam([*vae.parameters(), *conditional.parameters()], lr=2e-3)
for step in range(20):
    images = stripes(4)
    posterior = vae.encode(images).latent_dist
    latents = posterior.sample()
    reconstruction = F.mse_loss(vae.decode(latents).sample, images) + 1e-3 * posterior.kl().mean()
    noise, t = torch.randn_like(latents), torch.randint(0, 100, (4,))
    noisy = scheduler.add_noise(latents.detach(), noise, t)
    denoising = F.mse_loss(conditional(noisy, t, encoder_hidden_states=torch.randn(4, 3, 8)).sample, noise)
    loss = reconstruction + denoising
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print("latent", step, reconstruction.item(), denoising.item())
