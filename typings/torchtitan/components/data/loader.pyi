from torchtitan.components.dataloader import BaseDataLoader as BaseDataLoader
